// multi_tensor_unscale_l2norm on the CPU. Memory traffic: each input read once, each output, if any, written once.
//
// The check costs nothing: if the sum of squares is an ordinary number, so is every value.
#ifdef AMPKIT_CAPABILITY

namespace ampkit {
namespace AMPKIT_CAPABILITY {

template <class In, class Out>
static SumOfSquares unscale_run(const In* x, Out* out, int64_t n, ScaleFunctor functor) {
  const auto write = [&](int64_t i, Vector v, int64_t count) { put(out + i, functor(v), count); };
  if (static_cast<const void*>(x) != out) return sum_of_squares(x, n, write);
  const SumOfSquares squares = sum_of_squares(x, n);  // may read twice: before anything is overwritten
  for_each_vector(x, n, write);
  return squares;
}

static SumOfSquares unscale_block(const Block<2>& block, ScaleFunctor functor, bool writes) {
  const FlatTensor<2>& tensor = *block.tensor;
  SumOfSquares all = {0, true};
  for (int64_t start = 0; start < block.size; start += kSquares) {
    const int64_t offset = block.offset + start;
    const int64_t n = block.size - start < kSquares ? block.size - start : kSquares;
    const SumOfSquares squares = visit(tensor.data[0], tensor.dtype[0], offset, [&](const auto* x) {
      if (!writes) return sum_of_squares(x, n);
      return visit(tensor.data[1], tensor.dtype[1], offset, [&](auto* out) { return unscale_run(x, out, n, functor); });
    });
    all.sum += squares.sum;
    all.finite = all.finite && squares.finite;
  }
  return all;
}

}  // namespace AMPKIT_CAPABILITY
}  // namespace ampkit

#else

#include <cmath>

#include "cpu/multi_tensor_apply.h"
#include "functors/multi_tensor_scale.h"
#include "ops.h"

#define AMPKIT_SOURCE "cpu/multi_tensor_unscale_l2norm.cpp"
#include "cpu/each_capability.h"

namespace ampkit {

// The sums over blocks are float64, in an order that depends only on the sizes: a norm is the same bit for bit for any number of
// threads.
TwoTensors multi_tensor_unscale_l2norm_cpu(const TensorList& inputs, const TensorList& outputs, double inv_scale,
                                            const MaybeTensor& inv_scale_tensor, bool per_tensor,
                                            const MaybeTensor& found_inf, const MaybeTensor& first_bad) {
  constexpr const char* op = "multi_tensor_unscale_l2norm";
  AMPKIT_CHECK(!inputs.empty(), op, ": inputs is empty");
  const Findings findings(op, found_inf, first_bad, inputs[0]);
  const ScaleFunctor functor(number(op, inv_scale, inv_scale_tensor, inputs[0]));
  // Without outputs the inputs take their place, and are only read.
  const bool writes = !outputs.empty();
  TensorLists<2> lists(op, {{{inputs, Role::kRead}, {writes ? outputs : inputs, writes ? Role::kWrite : Role::kRead}}});
  const auto blocks = blocks_of(lists.flat());
  const auto unscale_block = AMPKIT_VARIANT(unscale_block);
  const auto float_vector = [](int64_t size) {
    return torch::stable::empty({&size, 1}, torch::headeronly::ScalarType::Float);
  };
  Tensor norm = float_vector(1), norms = float_vector(per_tensor ? static_cast<int64_t>(inputs.size()) : 0);
  SharedFindings found;
  std::vector<double> sums(blocks.size());
  for_each_block(blocks, [&](int64_t i) {
    const auto squares = unscale_block(blocks[i], functor, writes);
    sums[i] = squares.sum;
    if (!squares.finite) found.report(blocks[i].tensor - lists.flat().data());
  });
  found.write(findings);
  std::vector<double> of_tensors(inputs.size());
  for (size_t i = 0; i < blocks.size(); ++i) of_tensors[blocks[i].tensor - lists.flat().data()] += sums[i];
  double total = 0;
  for (double sum : of_tensors) total += sum;
  const double scale = std::fabs(static_cast<double>(functor.scale));
  const auto norm_of = [scale](double sum) { return static_cast<float>(std::sqrt(sum) * scale); };
  *static_cast<float*>(norm.mutable_data_ptr()) = norm_of(total);
  float* of_each = static_cast<float*>(norms.mutable_data_ptr());
  if (per_tensor) std::transform(of_tensors.begin(), of_tensors.end(), of_each, norm_of);
  return {norm, norms};
}

}  // namespace ampkit

#endif
