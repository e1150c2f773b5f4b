// The norms that reduction kernels return, from the sums of squares of their blocks. Sums over blocks are float64, in an
// order that depends only on the sizes: the norm is the same bit for bit for any number of threads.
#pragma once

#include <cmath>
#include <tuple>
#include <vector>

#include "cpu/multi_tensor_apply.h"

namespace ampkit {

template <int kDepth>
std::vector<double> sums_of_tensors(const std::vector<FlatTensor<kDepth>>& tensors, const std::vector<Block<kDepth>>& blocks,
                                    const std::vector<double>& sums) {
  std::vector<double> of_tensors(tensors.size());
  for (size_t i = 0; i < blocks.size(); ++i) of_tensors[blocks[i].tensor - tensors.data()] += sums[i];
  return of_tensors;
}

inline std::tuple<Tensor, Tensor> norms_of(const std::vector<double>& sums, double factor, bool per_tensor) {
  const auto float_vector = [](int64_t size) {
    return torch::stable::empty({&size, 1}, torch::headeronly::ScalarType::Float);
  };
  double total = 0;
  for (double sum : sums) total += sum;
  Tensor norm = float_vector(1);
  Tensor norms = float_vector(per_tensor ? static_cast<int64_t>(sums.size()) : 0);
  *static_cast<float*>(norm.mutable_data_ptr()) = static_cast<float>(std::sqrt(total) * factor);
  if (per_tensor)
    for (size_t i = 0; i < sums.size(); ++i)
      static_cast<float*>(norms.mutable_data_ptr())[i] = static_cast<float>(std::sqrt(sums[i]) * factor);
  return {norm, norms};
}

}  // namespace ampkit
