// multi_tensor_sgd on the CPU: functors/multi_tensor_sgd.h over the driver of cpu/multi_tensor_step.h.
#include "cpu/multi_tensor_step.h"
#include "functors/multi_tensor_sgd.h"
#include "ops.h"

#define AMPKIT_SOURCE "cpu/step_block.h"
#include "cpu/each_capability.h"

namespace ampkit {

void multi_tensor_sgd_cpu(const TensorList& grads, const TensorList& params, const TensorList& momenta, const TensorList& lower,
                          double lr, const MaybeTensor& lr_tensor, double momentum, double dampening, double weight_decay,
                          bool nesterov, bool first_run, bool wd_after_momentum, const MaybeTensor& trust, double factor,
                          const MaybeTensor& inv_scale, const MaybeTensor& clip, const MaybeTensor& found_inf) {
  constexpr const char* op = "multi_tensor_sgd";
  const SgdSettings settings{step_settings(op, grads, lr, lr_tensor, factor, inv_scale, clip, found_inf), momentum, dampening,
                             weight_decay, nesterov, first_run, wd_after_momentum};
  const float* each = vector_data(op, "trust", trust, grads);
  if (momentum == 0) {
    const StepLists<0> lists{op, grads, params, {}, lower};
    run_step<SgdFunctor<false>>(lists, settings, each, AMPKIT_VARIANT(step_block<SgdFunctor<false>>));
  } else {
    const StepLists<1> lists{op, grads, params, {{{"momenta", momenta, Role::kWrite}}}, lower};
    run_step<SgdFunctor<true>>(lists, settings, each, AMPKIT_VARIANT(step_block<SgdFunctor<true>>));
  }
}

}  // namespace ampkit
