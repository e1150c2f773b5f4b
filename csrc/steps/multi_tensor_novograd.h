// The host's side of multi_tensor_novograd on both devices, included once by each: see step_lists.h.
#include "functors/multi_tensor_novograd.h"
#include "ops.h"
#include "step_lists.h"

namespace ampkit {

void AMPKIT_ON_DEVICE(multi_tensor_novograd)(const TensorList& grads, const TensorList& params, const TensorList& exp_avgs,
                                             const Tensor& norms, const TensorList& lower, double lr, const MaybeTensor& lr_tensor,
                                             double beta1, double beta2, double eps, double step, const MaybeTensor& step_tensor,
                                             bool bias_correction, double weight_decay, bool grad_averaging,
                                             bool reg_inside_moment, double factor, const MaybeTensor& inv_scale,
                                             const MaybeTensor& clip, const MaybeTensor& found_inf) {
  constexpr const char* op = "multi_tensor_novograd";
  const NovogradSettings settings{step_settings(op, grads, lr, lr_tensor, factor, inv_scale, clip, found_inf),
                                  number(op, "step", step, step_tensor, grads[0]), beta1, beta2, eps, weight_decay,
                                  grad_averaging ? 1.0 - beta1 : 1.0, reg_inside_moment, bias_correction};
  const StepLists<1> lists{op, grads, params, {{{"exp_avgs", exp_avgs, Role::kWrite}}}, lower};
  AMPKIT_RUN_STEP(NovogradFunctor, lists, settings, vector_data(op, "norms", norms, grads));
}

}  // namespace ampkit
