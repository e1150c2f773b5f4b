// multi_tensor_accumulate on CUDA. Memory traffic: all inputs read once, totals and gradients written once.
#include "cuda/restore_run.cuh"
#include "functors/multi_tensor_accumulate.h"
#include "ops.h"

namespace ampkit {
namespace {

struct AccumulateKernel {
  Number inv_scale;
  Number exact_inv_scale;
  bool zeros_count;
  Findings findings;

  __device__ void operator()(const Chunk<4>& chunk) const {
    const AccumulateFunctor functor(inv_scale, exact_inv_scale, zeros_count);
    int32_t highest = 0;
    for (int i = threadIdx.x * kWidth; i < chunk.size; i += kStride) {
      const Raw raw_fresh = chunk.fetch(0, i), raw_grad = chunk.fetch(1, i), raw_exact = chunk.fetch(2, i);
      float fresh[kWidth], grad[kWidth], exact[kWidth], total[kWidth];
      chunk.unpack(0, raw_fresh, fresh);
      chunk.unpack(1, raw_grad, grad);
      chunk.unpack(2, raw_exact, exact);
      highest = max(highest, highest_magnitude(fresh));
      restore_run(functor.restore, grad, exact, chunk.dtype[1], grad);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) total[k] = functor(fresh[k], grad[k]);
      chunk.store(1, i, total);
      chunk.store(3, i, total);
    }
    report(findings, chunk.tensor, highest);
  }
};

}  // namespace

void multi_tensor_accumulate_cuda(const TensorList& fresh, const TensorList& grads, const TensorList& exacts,
                                  const TensorList& totals, double inv_scale, const MaybeTensor& inv_scale_tensor,
                                  double exact_inv_scale, const MaybeTensor& exact_inv_scale_tensor, bool zeros_count,
                                  const MaybeTensor& found_inf, const MaybeTensor& first_bad) {
  constexpr const char* op = "multi_tensor_accumulate";
  if (fresh.empty()) return;
  const int32_t device = device_of(op, fresh.front());
  const torch::stable::accelerator::DeviceGuard guard(device);
  TensorLists<4> lists(op, {{{"fresh", fresh, Role::kRead},
                             {"grads", grads, Role::kWrite},
                             {"exacts", exacts, Role::kRead},
                             {"totals", totals, Role::kWrite}}});
  const AccumulateKernel kernel{number(op, "inv_scale", inv_scale, inv_scale_tensor, fresh[0]),
                                number(op, "exact_inv_scale", exact_inv_scale, exact_inv_scale_tensor, fresh[0]), zeros_count,
                                {op, found_inf, first_bad, fresh[0]}};
  multi_tensor_apply(lists.flat(), kernel, current_stream(device));
  lists.finish();
}

}  // namespace ampkit
