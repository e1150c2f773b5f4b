// multi_tensor_restore_l2norm on CUDA. Memory traffic: both inputs read once; one float64 per block besides.
#include "cuda/norms.cuh"
#include "cuda/restore_run.cuh"
#include "ops.h"

namespace ampkit {
namespace {

struct RestoredSquaresKernel {
  Number inv_scale;
  bool zeros_count;
  double* sum_of_block;

  __device__ void operator()(const Chunk<2>& chunk) const {
    const RestoreFunctor functor(inv_scale, {1.0, nullptr}, zeros_count);
    double sum = 0;
    for (int i = threadIdx.x * kWidth; i < chunk.size; i += kStride) {
      const Raw raw_grad = chunk.fetch(0, i), raw_exact = chunk.fetch(1, i);
      float grad[kWidth], exact[kWidth];
      chunk.unpack(0, raw_grad, grad);
      chunk.unpack(1, raw_exact, exact);
      restore_run(functor, grad, exact, chunk.dtype[0], grad);
      sum += sum_of_squares(grad);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) sum_of_block[chunk.block] = sum;
  }
};

}  // namespace

std::tuple<Tensor, Tensor> multi_tensor_restore_l2norm_cuda(const TensorList& grads, const TensorList& exacts, double inv_scale,
                                                            const MaybeTensor& inv_scale_tensor, bool zeros_count,
                                                            bool per_tensor) {
  constexpr const char* op = "multi_tensor_restore_l2norm";
  AMPKIT_CHECK(!grads.empty(), op, ": grads is empty");
  const int32_t device = device_of(op, grads.front());
  const torch::stable::accelerator::DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  TensorLists<2> lists(op, {{{"grads", grads, Role::kRead}, {"exacts", exacts, Role::kRead}}});
  const std::vector<int64_t> first = first_blocks(lists.flat());
  const Norms norms(grads.front(), first, per_tensor);
  const Number inverse = number(op, "inv_scale", inv_scale, inv_scale_tensor, grads[0]);
  multi_tensor_apply(lists.flat(), RestoredSquaresKernel{inverse, zeros_count, norms.sum_of_block()}, stream);
  return norms.finish({1.0, nullptr}, stream);
}

}  // namespace ampkit
