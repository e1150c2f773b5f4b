// The host's side of multi_tensor_adam on both devices, included once by each: see step_lists.h.
#include "functors/multi_tensor_adam.h"
#include "ops.h"
#include "step_lists.h"

namespace ampkit {

void AMPKIT_ON_DEVICE(multi_tensor_adam)(const TensorList& grads, const TensorList& params, const TensorList& exp_avgs,
                                         const TensorList& exp_avg_sqs, const TensorList& lower, double lr,
                                         const MaybeTensor& lr_tensor, double beta1, double beta2, double eps, double step,
                                         const MaybeTensor& step_tensor, bool decoupled, bool bias_correction, double weight_decay,
                                         double factor, const MaybeTensor& inv_scale, const MaybeTensor& clip,
                                         const MaybeTensor& found_inf, const MaybeTensor& positions, int64_t seed,
                                         bool round_params) {
  constexpr const char* op = "multi_tensor_adam";
  const AdamSettings settings{step_settings(op, grads, lr, lr_tensor, factor, inv_scale, clip, found_inf),
                              number(op, "step", step, step_tensor, grads[0]), beta1, beta2, eps, weight_decay, 1.0 - beta1,
                              decoupled, bias_correction};
  const StepLists<2> lists{
      op, grads, params, {{{"exp_avgs", exp_avgs, Role::kMoment}, {"exp_avg_sqs", exp_avg_sqs, Role::kMoment}}}, lower};
  const Rounding rounding = rounding_of(op, grads, positions, settings.step, seed, round_params);
  AMPKIT_RUN_ROUNDED_STEP(AdamFunctor, lists, settings, nullptr, rounding);
}

}  // namespace ampkit
