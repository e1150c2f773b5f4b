// multi_tensor_step on CUDA: the kernels of multi_tensor_step.cuh and rounded_step.cuh over every rule of step.h. A rule with norms of
// its own has a file of its own.
#include "cuda/rounded_step.cuh"
#include "ops.h"

namespace ampkit {
namespace {

template <class Functor>
void take_step(Step<Functor>& step, TensorView, cudaStream_t stream) {
  const auto& tensors = step.lists.flat();
  if constexpr (Functor::kTakesRests) {
    bool splits = false;
    for (const auto& tensor : tensors) splits = splits || is_rest(tensor.dtype[step.kLower]);
    if (step.rounding.draws() || step.lists.has_packed())
      multi_tensor_apply(tensors, RoundedStepKernel<Functor>{step.settings, step.each, step.rounding, step.writes_lower}, stream);
    else if (splits)
      multi_tensor_apply(tensors, StepKernel<Functor, true>{step.settings, step.each, step.writes_lower}, stream);
    else
      multi_tensor_apply(tensors, StepKernel<Functor, false>{step.settings, step.each, step.writes_lower}, stream);
  } else {
    multi_tensor_apply(tensors, StepKernel<Functor, false>{step.settings, step.each, step.writes_lower}, stream);
  }
  step.lists.finish();
}

void take_step(Step<LambFunctor>& step, TensorView beside, cudaStream_t stream) { take_lamb_step(step, beside, stream); }

}  // namespace

void multi_tensor_step_cuda(const std::string& rule, const TensorList& grads, const TensorList& written,
                            const std::vector<double>& settings, const MaybeTensor& lr, const MaybeTensor& step,
                            const MaybeTensor& inv_scale, const MaybeTensor& clip, const MaybeTensor& found_inf,
                            const MaybeTensor& each, const MaybeTensor& positions) {
  AMPKIT_CHECK(!grads.empty(), "multi_tensor_step: grads is empty");
  const int32_t device = device_of("multi_tensor_step", grads.front());
  const torch::stable::accelerator::DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  const StepArguments given{grads, written, settings, lr, step, inv_scale, clip, found_inf, each, positions};
  Rules::find(rule, given, [&](auto&& one) { take_step(one, grads.front(), stream); });
}

}  // namespace ampkit
