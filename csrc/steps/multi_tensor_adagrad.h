// The host's side of multi_tensor_adagrad on both devices, included once by each: see step_lists.h.
#include "functors/multi_tensor_adagrad.h"
#include "ops.h"
#include "step_lists.h"

namespace ampkit {

void AMPKIT_ON_DEVICE(multi_tensor_adagrad)(const TensorList& grads, const TensorList& params, const TensorList& sums,
                                            const TensorList& lower, double lr, const MaybeTensor& lr_tensor, double eps,
                                            bool decoupled, double weight_decay, double factor, const MaybeTensor& inv_scale,
                                            const MaybeTensor& clip, const MaybeTensor& found_inf) {
  constexpr const char* op = "multi_tensor_adagrad";
  const AdagradSettings settings{step_settings(op, grads, lr, lr_tensor, factor, inv_scale, clip, found_inf), eps,
                                 weight_decay, decoupled};
  const StepLists<1> lists{op, grads, params, {{{"sums", sums, Role::kWrite}}}, lower};
  AMPKIT_RUN_STEP(AdagradFunctor, lists, settings, nullptr);
}

}  // namespace ampkit
