// multi_tensor_unscale_l2norm on the CPU. Memory traffic: each input read once, each output, if any, written once.
//
// The check costs nothing: where the sum of squares is an ordinary number, every value is.
#ifdef AMPKIT_CAPABILITY

namespace ampkit {
namespace AMPKIT_CAPABILITY {

template <class In, class Out>
static void unscale_tile(const In* x, Out* out, int64_t n, ScaleFunctor functor) {
#pragma GCC ivdep  // out may be x itself, element for element
  for (int64_t i = 0; i < n; ++i) narrow(functor(widen(x[i])), out[i]);
}

template <class In>
static void unscale_tile(const In* x, const Sink& to, int64_t n, ScaleFunctor functor) {
  if (to.is_bfloat16)
    unscale_tile(x, static_cast<BFloat16*>(to.data), n, functor);
  else
    unscale_tile(x, static_cast<float*>(to.data), n, functor);
}

static SumOfSquares unscale_block(const Block<2>& block, ScaleFunctor functor, bool writes, bool streams) {
  const FlatTensor<2>& tensor = *block.tensor;
  streams = streams && tensor.data[0] != tensor.data[1];
  TileBuffer in_buffer, out_buffer;
  SumOfSquares all = {0, true};
  for (int64_t start = 0; start < block.size; start += kTile) {
    const int64_t offset = block.offset + start;
    const int64_t n = block.size - start < kTile ? block.size - start : kTile;
    const Source from = source(tensor.data[0], tensor.dtype[0], offset, n, in_buffer);
    const SumOfSquares squares = sum_of_squares(from, n);
    all.sum += squares.sum;
    all.finite = all.finite && squares.finite;
    if (!writes) continue;
    const Sink to = sink(tensor.data[1], tensor.dtype[1], offset, out_buffer, streams);
    if (from.is_bfloat16)
      unscale_tile(static_cast<const BFloat16*>(from.data), to, n, functor);
    else
      unscale_tile(static_cast<const float*>(from.data), to, n, functor);
    finish(to, tensor.data[1], tensor.dtype[1], offset, n, streams);
  }
  finish_streams(writes && streams);
  return all;
}

}  // namespace AMPKIT_CAPABILITY
}  // namespace ampkit

#else

#include "cpu/norms.h"
#include "functors/multi_tensor_scale.h"
#include "ops.h"

#define AMPKIT_SOURCE "cpu/multi_tensor_unscale_l2norm.cpp"
#include "cpu/each_capability.h"

namespace ampkit {

std::tuple<Tensor, Tensor> multi_tensor_unscale_l2norm_cpu(const TensorList& inputs, const TensorList& outputs,
                                                           double inv_scale, const MaybeTensor& inv_scale_tensor,
                                                           const MaybeTensor& found_inf, bool per_tensor,
                                                           const MaybeTensor& first_bad) {
  constexpr const char* op = "multi_tensor_unscale_l2norm";
  AMPKIT_CHECK(!inputs.empty(), op, ": inputs is empty");
  const Findings findings(op, found_inf, first_bad, inputs[0]);
  const ScaleFunctor functor(number(op, "inv_scale", inv_scale, inv_scale_tensor, inputs[0]));
  // Without outputs the inputs stand in for them, and are only read.
  const bool writes = !outputs.empty();
  TensorLists<2> lists(op, {{{"inputs", inputs, Role::kRead},
                             {"outputs", writes ? outputs : inputs, writes ? Role::kWrite : Role::kRead}}});
  const auto blocks = blocks_of(lists.flat());
  const bool streams = exceeds_caches(blocks);
  const auto unscale_block = AMPKIT_VARIANT(unscale_block);
  SharedFindings found;
  std::vector<double> sums(blocks.size());
  for_each_block(blocks, [&](int64_t i) {
    const auto squares = unscale_block(blocks[i], functor, writes, streams);
    sums[i] = squares.sum;
    if (!squares.finite) found.report(blocks[i].tensor - lists.flat().data());
  });
  lists.finish();
  found.write(findings);
  return norms_of(sums_of_tensors(lists.flat(), blocks, sums), std::fabs(static_cast<double>(functor.scale)), per_tensor);
}

}  // namespace ampkit

#endif
