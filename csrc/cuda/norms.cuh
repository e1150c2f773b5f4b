// The last steps of reduction kernels, whose blocks leave a float64 sum each: the sums of each tensor are added, then all
// of them. No step uses atomics, so a norm is the same bit for bit from run to run.
#pragma once

#include <algorithm>
#include <tuple>

#include "cuda/multi_tensor_apply.cuh"
#include "functors/multi_tensor_l2norm.h"
#include "functors/number.h"

namespace ampkit {

// The squares of the elements that a thread takes at once: in float32 if that keeps their digits, because many GPUs have few
// units for float64. Sums of these are float64.
__device__ inline double sum_of_squares(const float (&values)[kWidth]) {
  float sum = 0;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) sum += values[k] * values[k];
  if (is_safe(sum) || highest_magnitude(values) == 0) return sum;
  const SquareFunctor square;
  double wide = 0;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) wide += square(values[k]);
  return wide;
}

// The sum over all threads of a block, for thread 0. Every thread must call this.
__device__ inline double block_sum(double value) {
  __shared__ double of_warp[kThreads / 32];
  __syncthreads();  // an earlier sum may still be read
  for (int step = 16; step > 0; step /= 2) value += __shfl_down_sync(0xffffffff, value, step);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  value = threadIdx.x < kThreads / 32 ? of_warp[threadIdx.x] : 0.0;
  if (threadIdx.x < 32)
    for (int step = 16; step > 0; step /= 2) value += __shfl_down_sync(0xffffffff, value, step);
  return value;
}

__device__ inline double sum_of_range(const double* sums, int64_t first, int64_t last) {
  double sum = 0;
  for (int64_t i = first + threadIdx.x; i < last; i += kThreads) sum += sums[i];
  return block_sum(sum);
}

// The first blocks of consecutive tensors; each entry is also the end of the one before. As many as the arguments of a launch have
// room for, or few, which are copied faster.
constexpr int kManyRanges = (kMaxArguments - kMaxKernelSize) / 8 - 1, kFewRanges = 255;
template <int kRanges>
struct BlockRanges {
  int64_t first[kRanges + 1];
};

// Calls finish(tensor, first block, last block) for each tensor, with one block of threads for each.
template <int kRanges, class Finish>
__global__ void __launch_bounds__(kThreads)
    of_each_tensor_kernel(const __grid_constant__ BlockRanges<kRanges> ranges, int64_t start, const __grid_constant__ Finish finish) {
  finish(start + blockIdx.x, ranges.first[blockIdx.x], ranges.first[blockIdx.x + 1]);
}

template <int kRanges, class Finish>
void for_each_range(const std::vector<int64_t>& first_blocks, const Finish& finish, cudaStream_t stream) {
  static_assert(sizeof(BlockRanges<kRanges>) + sizeof(int64_t) + sizeof(Finish) <= kMaxArguments, "too many arguments");
  const int64_t count = static_cast<int64_t>(first_blocks.size()) - 1;
  for (int64_t start = 0; start < count; start += kRanges) {
    const int64_t here = std::min<int64_t>(kRanges, count - start);
    BlockRanges<kRanges> ranges;
    std::copy_n(first_blocks.begin() + start, here + 1, ranges.first);
    of_each_tensor_kernel<kRanges, Finish><<<static_cast<unsigned>(here), kThreads, 0, stream>>>(ranges, start, finish);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

template <class Finish>
void for_each_tensor(const std::vector<int64_t>& first_blocks, const Finish& finish, cudaStream_t stream) {
  if (first_blocks.size() <= kFewRanges + 1)
    for_each_range<kFewRanges>(first_blocks, finish, stream);
  else
    for_each_range<kManyRanges>(first_blocks, finish, stream);
}

inline Tensor vector_beside(TensorView tensor, int64_t size, torch::headeronly::ScalarType dtype) {
  const int64_t width = dtype == torch::headeronly::ScalarType::Double ? 8 : 4;
  return allocated(size * width, [&] { return torch::stable::new_empty(tensor.share(), {&size, 1}, dtype); });
}

// norms[tensor] = sqrt of the tensor's sum * |factor|
struct FinishNorm {
  const double* sums;
  Number factor;
  float* norms;

  __device__ void operator()(int64_t tensor, int64_t first, int64_t last) const {
    const double sum = sum_of_range(sums, first, last);
    if (threadIdx.x == 0) norms[tensor] = static_cast<float>(sqrt(sum) * fabs(factor.get()));
  }
};

// The results of a reduction: the sums of squares of all blocks, then the norm of all tensors and of each, or [0]. Allocated before
// the first launch: if memory is short, nothing has been written yet, and the call may be repeated.
class Norms {
 public:
  Norms(TensorView beside, const std::vector<int64_t>& first_blocks, bool per_tensor)
      : first_blocks_(first_blocks),
        sums_(vector_beside(beside, first_blocks.back(), ScalarType::Double)),
        norm_(vector_beside(beside, 1, ScalarType::Float)),
        norms_(vector_beside(beside, per_tensor ? static_cast<int64_t>(first_blocks.size()) - 1 : 0, ScalarType::Float)),
        per_tensor_(per_tensor) {}

  double* sum_of_block() const { return static_cast<double*>(sums_.mutable_data_ptr()); }

  std::tuple<Tensor, Tensor> finish(Number factor, cudaStream_t stream) const {
    if (per_tensor_)
      for_each_tensor(first_blocks_, FinishNorm{sum_of_block(), factor, static_cast<float*>(norms_.mutable_data_ptr())}, stream);
    for_each_tensor({0, first_blocks_.back()}, FinishNorm{sum_of_block(), factor, static_cast<float*>(norm_.mutable_data_ptr())},
                    stream);
    return {norm_, norms_};
  }

 private:
  using ScalarType = torch::headeronly::ScalarType;

  const std::vector<int64_t>& first_blocks_;
  Tensor sums_, norm_, norms_;
  bool per_tensor_;
};

}  // namespace ampkit
