// multi_tensor_adagrad on the CPU: functors/multi_tensor_adagrad.h over the driver of cpu/multi_tensor_step.h.
#include "cpu/multi_tensor_step.h"
#include "functors/multi_tensor_adagrad.h"
#include "ops.h"

#define AMPKIT_SOURCE "cpu/step_block.h"
#include "cpu/each_capability.h"

namespace ampkit {

void multi_tensor_adagrad_cpu(const TensorList& grads, const TensorList& params, const TensorList& sums,
                              const TensorList& lower, double lr, const MaybeTensor& lr_tensor, double eps, bool decoupled,
                              double weight_decay, double factor, const MaybeTensor& inv_scale, const MaybeTensor& clip,
                              const MaybeTensor& found_inf) {
  constexpr const char* op = "multi_tensor_adagrad";
  const AdagradSettings settings{step_settings(op, grads, lr, lr_tensor, factor, inv_scale, clip, found_inf), eps,
                                 weight_decay, decoupled};
  const StepLists<1> lists{op, grads, params, {{{"sums", sums, Role::kWrite}}}, lower};
  run_step<AdagradFunctor>(lists, settings, nullptr, AMPKIT_VARIANT(step_block<AdagradFunctor>));
}

}  // namespace ampkit
