// multi_tensor_l2norm on CUDA. Memory traffic: each tensor read once; one float64 per block besides.
//
// Three steps: every block leaves the sum of its squares, the sums of each tensor are added, then all of them. No step
// uses atomics, so the norm is the same bit for bit from run to run.
#include <algorithm>

#include "cuda/multi_tensor_apply.cuh"
#include "functors/multi_tensor_l2norm.h"
#include "ops.h"

namespace ampkit {
namespace {

// The sum over all threads of a block, for thread 0.
__device__ double block_sum(double value) {
  __shared__ double of_warp[kThreads / 32];
  for (int step = 16; step > 0; step /= 2) value += __shfl_down_sync(0xffffffff, value, step);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  value = threadIdx.x < kThreads / 32 ? of_warp[threadIdx.x] : 0.0;
  if (threadIdx.x < 32)
    for (int step = 16; step > 0; step /= 2) value += __shfl_down_sync(0xffffffff, value, step);
  return value;
}

struct SumOfSquaresKernel {
  double* sum_of_block;

  __device__ void operator()(const Chunk<1>& chunk) const {
    const SquareFunctor square;
    double sum = 0;
    for (int64_t i = threadIdx.x * kWidth; i < chunk.size; i += kThreads * kWidth) {
      float x[kWidth];
      chunk.load(0, i, x);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sum += square(x[k]);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) sum_of_block[chunk.block] = sum;
  }
};

// Where the blocks of consecutive tensors begin and, in the next entry, end.
constexpr int kRangesPerLaunch = 256;
struct BlockRanges {
  int64_t first[kRangesPerLaunch + 1];
};

__device__ double sum_of_range(const double* sums, int64_t first, int64_t last) {
  double sum = 0;
  for (int64_t i = first + threadIdx.x; i < last; i += kThreads) sum += sums[i];
  return block_sum(sum);
}

__global__ void norm_of_each_kernel(const double* sum_of_block, BlockRanges ranges, float* norms) {
  const double sum = sum_of_range(sum_of_block, ranges.first[blockIdx.x], ranges.first[blockIdx.x + 1]);
  if (threadIdx.x == 0) norms[blockIdx.x] = static_cast<float>(sqrt(sum));
}

__global__ void norm_of_all_kernel(const double* sum_of_block, int64_t blocks, float* norm) {
  const double sum = sum_of_range(sum_of_block, 0, blocks);
  if (threadIdx.x == 0) *norm = static_cast<float>(sqrt(sum));
}

}  // namespace

std::tuple<Tensor, Tensor> multi_tensor_l2norm_cuda(const TensorList& tensors, bool per_tensor) {
  using torch::headeronly::ScalarType;
  AMPKIT_CHECK(!tensors.empty(), "multi_tensor_l2norm: tensors is empty");
  const int32_t device = tensors.front().get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  TensorLists<1> lists("multi_tensor_l2norm", {{{"tensors", tensors, Role::kRead}}});
  const std::vector<int64_t> first = first_blocks(lists.flat());
  const int64_t count = static_cast<int64_t>(tensors.size());

  const auto vector = [&](int64_t size, ScalarType dtype) {
    return torch::stable::new_empty(tensors.front(), {&size, 1}, dtype);
  };
  Tensor sums = vector(first.back(), ScalarType::Double);
  Tensor norm = vector(1, ScalarType::Float);
  Tensor norms = vector(per_tensor ? count : 0, ScalarType::Float);
  double* sum_of_block = static_cast<double*>(sums.mutable_data_ptr());
  multi_tensor_apply(lists.flat(), SumOfSquaresKernel{sum_of_block}, stream);
  for (int64_t start = 0; per_tensor && start < count; start += kRangesPerLaunch) {
    const int64_t here = std::min<int64_t>(kRangesPerLaunch, count - start);
    BlockRanges ranges;
    std::copy_n(first.begin() + start, here + 1, ranges.first);
    float* target = static_cast<float*>(norms.mutable_data_ptr()) + start;
    norm_of_each_kernel<<<static_cast<unsigned>(here), kThreads, 0, stream>>>(sum_of_block, ranges, target);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  norm_of_all_kernel<<<1, kThreads, 0, stream>>>(sum_of_block, first.back(), static_cast<float*>(norm.mutable_data_ptr()));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return {norm, norms};
}

}  // namespace ampkit
