// The host's side of multi_tensor_sgd on both devices, included once by each: see step_lists.h.
#include "functors/multi_tensor_sgd.h"
#include "ops.h"
#include "step_lists.h"

namespace ampkit {

void AMPKIT_ON_DEVICE(multi_tensor_sgd)(const TensorList& grads, const TensorList& params, const TensorList& momenta,
                                        const TensorList& lower, double lr, const MaybeTensor& lr_tensor, double momentum,
                                        double dampening, double weight_decay, bool nesterov, bool first_run,
                                        bool wd_after_momentum, const MaybeTensor& trust, double factor,
                                        const MaybeTensor& inv_scale, const MaybeTensor& clip, const MaybeTensor& found_inf,
                                        double step, const MaybeTensor& step_tensor, const MaybeTensor& positions, int64_t seed,
                                        bool round_params) {
  constexpr const char* op = "multi_tensor_sgd";
  const SgdSettings settings{step_settings(op, grads, lr, lr_tensor, factor, inv_scale, clip, found_inf), momentum, dampening,
                             weight_decay, nesterov, first_run, wd_after_momentum};
  const float* each = vector_data(op, "trust", trust, grads);
  const Rounding rounding =
      rounding_of(op, grads, positions, number(op, "step", step, step_tensor, grads[0]), seed, round_params);
  if (momentum == 0) {
    const StepLists<0> lists{op, grads, params, {}, lower};
    AMPKIT_RUN_ROUNDED_STEP(SgdFunctor<false>, lists, settings, each, rounding);
  } else {
    const StepLists<1> lists{op, grads, params, {{{"momenta", momenta, Role::kMoment}}}, lower};
    AMPKIT_RUN_ROUNDED_STEP(SgdFunctor<true>, lists, settings, each, rounding);
  }
}

}  // namespace ampkit
