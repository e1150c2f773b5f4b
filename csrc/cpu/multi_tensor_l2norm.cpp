// multi_tensor_l2norm on the CPU. Memory traffic: each tensor read once.
#ifdef AMPKIT_CAPABILITY

namespace ampkit {
namespace AMPKIT_CAPABILITY {

static double squares_of_block(const Block<1>& block) {
  const FlatTensor<1>& tensor = *block.tensor;
  double sum = 0;
  visit(tensor.data[0], tensor.dtype[0], block.offset, [&](const auto* x) {
    for (int64_t i = 0; i < block.size; i += kSquares)
      sum += sum_of_squares(x + i, block.size - i < kSquares ? block.size - i : kSquares).sum;
  });
  return sum;
}

}  // namespace AMPKIT_CAPABILITY
}  // namespace ampkit

#else

#include "cpu/norms.h"
#include "ops.h"

#define AMPKIT_SOURCE "cpu/multi_tensor_l2norm.cpp"
#include "cpu/each_capability.h"

namespace ampkit {

std::tuple<Tensor, Tensor> multi_tensor_l2norm_cpu(const TensorList& tensors, bool per_tensor) {
  TensorLists<1> lists("multi_tensor_l2norm", {{{"tensors", tensors, Role::kRead}}});
  const auto blocks = blocks_of(lists.flat());
  const auto squares_of_block = AMPKIT_VARIANT(squares_of_block);
  std::vector<double> sums(blocks.size());
  for_each_block(blocks, [&](int64_t i) { sums[i] = squares_of_block(blocks[i]); });
  return norms_of(sums_of_tensors(lists.flat(), blocks, sums), 1.0, per_tensor);
}

}  // namespace ampkit

#endif
