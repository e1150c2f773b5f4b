// multi_tensor_l2norm on the CPU. Memory traffic: each tensor read once.
//
// Sums are float64, in an order that depends on nothing but the sizes: over sixteen lanes within a block, then block
// after block. So the norm is the same bit for bit for any number of threads and any instruction set.
#ifdef AMPKIT_CAPABILITY

namespace ampkit {
namespace AMPKIT_CAPABILITY {

static double sum_of_squares(const Block<1>& block) {
  constexpr int kLanes = 16;
  const SquareFunctor square;
  const FlatTensor<1>& tensor = *block.tensor;
  TileBuffer buffer;
  double lanes[kLanes] = {};
  for (int64_t start = 0; start < block.size; start += kTile) {
    const int64_t n = block.size - start < kTile ? block.size - start : kTile;
    const float* x = load(tensor.data[0], tensor.dtype[0], block.offset + start, n, buffer);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
      for (int k = 0; k < kLanes; ++k) lanes[k] += square(x[i + k]);
    for (int k = 0; i + k < n; ++k) lanes[k] += square(x[i + k]);
  }
  double sum = 0;
  for (int k = 0; k < kLanes; ++k) sum += lanes[k];
  return sum;
}

}  // namespace AMPKIT_CAPABILITY
}  // namespace ampkit

#else

#include <cmath>

#include "cpu/multi_tensor_apply.h"
#include "functors/multi_tensor_l2norm.h"
#include "ops.h"

#define AMPKIT_SOURCE "cpu/multi_tensor_l2norm.cpp"
#include "cpu/each_capability.h"

namespace ampkit {

std::tuple<Tensor, Tensor> multi_tensor_l2norm_cpu(const TensorList& tensors, bool per_tensor) {
  TensorLists<1> lists("multi_tensor_l2norm", {{{"tensors", tensors, Role::kRead}}});
  const auto blocks = blocks_of(lists.flat());
  const auto sum_of_squares = AMPKIT_VARIANT(sum_of_squares);
  std::vector<double> sums(blocks.size());
  for_each_block(blocks, [&](int64_t i) { sums[i] = sum_of_squares(blocks[i]); });

  std::vector<double> sums_of_tensors(tensors.size());
  for (size_t i = 0; i < blocks.size(); ++i) sums_of_tensors[blocks[i].tensor - lists.flat().data()] += sums[i];
  double total = 0;
  for (double sum : sums_of_tensors) total += sum;

  const auto float_vector = [](int64_t size) {
    return torch::stable::empty({&size, 1}, torch::headeronly::ScalarType::Float);
  };
  Tensor norm = float_vector(1);
  Tensor norms = float_vector(per_tensor ? static_cast<int64_t>(tensors.size()) : 0);
  *static_cast<float*>(norm.mutable_data_ptr()) = static_cast<float>(std::sqrt(total));
  if (per_tensor)
    for (size_t i = 0; i < tensors.size(); ++i)
      static_cast<float*>(norms.mutable_data_ptr())[i] = static_cast<float>(std::sqrt(sums_of_tensors[i]));
  return {norm, norms};
}

}  // namespace ampkit

#endif
