// multi_tensor_l2norm on CUDA. Memory traffic: each tensor read once; one float64 per block besides.
#include "cuda/norms.cuh"
#include "ops.h"

namespace ampkit {
namespace {

struct SumOfSquaresKernel {
  double* sum_of_block;

  __device__ void operator()(const Chunk<1>& chunk) const {
    constexpr int kBatch = 2;
    double sum = 0;
    for (int start = threadIdx.x * kWidth; start < chunk.size; start += kBatch * kStride) {
      Raw raw[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) raw[b] = chunk.fetch(0, start + b * kStride);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        float x[kWidth];
        chunk.unpack(0, raw[b], x);
        sum += sum_of_squares(x);
      }
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) sum_of_block[chunk.block] = sum;
  }
};

}  // namespace

std::tuple<Tensor, Tensor> multi_tensor_l2norm_cuda(const TensorList& tensors, bool per_tensor) {
  AMPKIT_CHECK(!tensors.empty(), "multi_tensor_l2norm: tensors is empty");
  const int32_t device = device_of("multi_tensor_l2norm", tensors.front());
  const torch::stable::accelerator::DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  TensorLists<1> lists("multi_tensor_l2norm", {{{"tensors", tensors, Role::kRead}}});
  const std::vector<int64_t> first = first_blocks(lists.flat());
  const Norms norms(tensors.front(), first, per_tensor);
  multi_tensor_apply(lists.flat(), SumOfSquaresKernel{norms.sum_of_block()}, stream);
  return norms.finish({1.0, nullptr}, stream);
}

}  // namespace ampkit
