// multi_tensor_restore_l2norm on the CPU. Memory traffic: both inputs read once.
#ifdef AMPKIT_CAPABILITY
#include "cpu/rows.h"

namespace ampkit {
namespace AMPKIT_CAPABILITY {

static double squares_of_restored(const Block<2>& block, RestoreFunctor functor) {
  const FlatTensor<2>& tensor = *block.tensor;
  alignas(64) float values[kSquares];
  double sum = 0;
  visit_pair({tensor.data[0], tensor.dtype[0]}, {tensor.data[1], tensor.dtype[1]}, true, [&](auto grad, auto exact) {
    for (int64_t start = 0; start < block.size; start += kSquares) {
      const int64_t offset = block.offset + start;
      const int64_t n = block.size - start < kSquares ? block.size - start : kSquares;
      for_each_row(offset, n, [&](int64_t i, int64_t count) AMPKIT_LAMBDA_INLINE {
        put_row<false>(values, i - offset, restored(functor, grad, exact, i, count), count);
      });
      sum += sum_of_squares(values, n).sum;
    }
  });
  return sum;
}

}  // namespace AMPKIT_CAPABILITY
}  // namespace ampkit

#else

#include "cpu/norms.h"
#include "functors/multi_tensor_restore.h"
#include "ops.h"

#define AMPKIT_SOURCE "cpu/multi_tensor_restore_l2norm.cpp"
#include "cpu/each_capability.h"

namespace ampkit {

std::tuple<Tensor, Tensor> multi_tensor_restore_l2norm_cpu(const TensorList& grads, const TensorList& exacts, double inv_scale,
                                                           const MaybeTensor& inv_scale_tensor, bool zeros_count,
                                                           bool per_tensor) {
  constexpr const char* op = "multi_tensor_restore_l2norm";
  AMPKIT_CHECK(!grads.empty(), op, ": grads is empty");
  TensorLists<2> lists(op, {{{"grads", grads, Role::kRead}, {"exacts", exacts, Role::kRead}}});
  const RestoreFunctor functor(number(op, "inv_scale", inv_scale, inv_scale_tensor, grads[0]), {1.0, nullptr}, zeros_count);
  const auto blocks = blocks_of(lists.flat());
  const auto squares_of_restored = AMPKIT_VARIANT(squares_of_restored);
  std::vector<double> sums(blocks.size());
  for_each_block(blocks, [&](int64_t i) { sums[i] = squares_of_restored(blocks[i], functor); });
  return norms_of(sums_of_tensors(lists.flat(), blocks, sums), 1.0, per_tensor);
}

}  // namespace ampkit

#endif
