// multi_tensor_restore on CUDA. Memory traffic: both inputs read once, each output written once.
#include "cuda/restore_run.cuh"
#include "ops.h"

namespace ampkit {
namespace {

struct RestoreKernel {
  Number inv_scale;
  Number factor;
  bool zeros_count;

  __device__ void operator()(const Chunk<3>& chunk) const {
    const RestoreFunctor functor(inv_scale, factor, zeros_count);
    for (int i = threadIdx.x * kWidth; i < chunk.size; i += kStride) {
      const Raw raw_grad = chunk.fetch(0, i), raw_exact = chunk.fetch(1, i);
      float grad[kWidth], exact[kWidth], out[kWidth];
      chunk.unpack(0, raw_grad, grad);
      chunk.unpack(1, raw_exact, exact);
      restore_run(functor, grad, exact, chunk.dtype[0], out);
      chunk.store(2, i, out);
    }
  }
};

}  // namespace

void multi_tensor_restore_cuda(const TensorList& grads, const TensorList& exacts, const TensorList& outputs, double inv_scale,
                               const MaybeTensor& inv_scale_tensor, double factor, const MaybeTensor& factor_tensor,
                               bool zeros_count) {
  constexpr const char* op = "multi_tensor_restore";
  if (grads.empty() && exacts.empty() && outputs.empty()) return;
  const TensorView some = grads.empty() ? (exacts.empty() ? outputs.front() : exacts.front()) : grads.front();
  const int32_t device = device_of(op, some);
  const torch::stable::accelerator::DeviceGuard guard(device);
  TensorLists<3> lists(op, {{{"grads", grads, Role::kRead}, {"exacts", exacts, Role::kRead}, {"outputs", outputs, Role::kWrite}}});
  const RestoreKernel kernel{number(op, "inv_scale", inv_scale, inv_scale_tensor, some),
                             number(op, "factor", factor, factor_tensor, some), zeros_count};
  multi_tensor_apply(lists.flat(), kernel, current_stream(device));
  lists.finish();
}

}  // namespace ampkit
