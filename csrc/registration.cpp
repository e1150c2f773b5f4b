// The op x device matrix on one page: schemas first, then who implements them. The CUDA column is compiled into a
// library of its own (cuda/registration.cpp), because a CPU build of torch cannot load it.
//
// Only torch's stable ABI is used (torch/csrc/stable, torch/headeronly), so one binary serves torch 2.10 and newer.
#include <Python.h>
#include <torch/csrc/stable/library.h>
#include <torch/headeronly/version.h>

#include "direct.h"
#include "ops.h"

STABLE_TORCH_LIBRARY(ampkit, m) {
  m.def(
      "multi_tensor_scale(Tensor[] inputs, Tensor(a!)[] outputs, float scale, Tensor? scale_tensor, Tensor(b!)? found_inf, "
      "Tensor(c!)? first_bad) -> ()");
  m.def(
      "multi_tensor_axpby(Tensor[] xs, Tensor[] ys, Tensor(a!)[] outputs, float a, Tensor? a_tensor, float b, "
      "Tensor? b_tensor, Tensor(b!)? found_inf, int arg_to_check, Tensor(c!)? first_bad) -> ()");
  m.def("multi_tensor_join(Tensor[] weights, Tensor[] rests, Tensor(a!)[] outputs) -> ()");
  m.def("multi_tensor_split(Tensor[] values, Tensor(a!)[] weights, Tensor(b!)[] rests) -> ()");
  m.def(
      "multi_tensor_unscale_l2norm(Tensor[] inputs, Tensor(a!)[] outputs, float inv_scale, Tensor? inv_scale_tensor, "
      "Tensor(b!)? found_inf, bool per_tensor, Tensor(c!)? first_bad) -> (Tensor, Tensor)");
  m.def(
      "multi_tensor_sgd(Tensor[] grads, Tensor(a!)[] params, Tensor(b!)[] momenta, Tensor(c!)[] lower, float lr, "
      "Tensor? lr_tensor, float momentum, float dampening, float weight_decay, bool nesterov, bool first_run, "
      "bool wd_after_momentum, Tensor? trust, float factor, Tensor? inv_scale, Tensor? clip, Tensor? found_inf, float step, "
      "Tensor? step_tensor, Tensor? positions, int seed, bool round_params) -> ()");
  m.def(
      "multi_tensor_adam(Tensor[] grads, Tensor(a!)[] params, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
      "Tensor(d!)[] lower, float lr, Tensor? lr_tensor, float beta1, float beta2, float eps, float step, "
      "Tensor? step_tensor, bool decoupled, bool bias_correction, float weight_decay, float factor, Tensor? inv_scale, "
      "Tensor? clip, Tensor? found_inf, Tensor? positions, int seed, bool round_params) -> ()");
  m.def(
      "multi_tensor_adagrad(Tensor[] grads, Tensor(a!)[] params, Tensor(b!)[] sums, Tensor(c!)[] lower, float lr, "
      "Tensor? lr_tensor, float eps, bool decoupled, float weight_decay, float factor, Tensor? inv_scale, Tensor? clip, "
      "Tensor? found_inf) -> ()");
  m.def(
      "multi_tensor_novograd(Tensor[] grads, Tensor(a!)[] params, Tensor(b!)[] exp_avgs, Tensor norms, "
      "Tensor(c!)[] lower, float lr, Tensor? lr_tensor, float beta1, float beta2, float eps, float step, "
      "Tensor? step_tensor, bool bias_correction, float weight_decay, bool grad_averaging, bool reg_inside_moment, "
      "float factor, Tensor? inv_scale, Tensor? clip, Tensor? found_inf) -> ()");
  m.def(
      "multi_tensor_lamb(Tensor[] grads, Tensor(a!)[] params, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
      "Tensor(d!)[] lower, Tensor(e!)[] directions, float lr, Tensor? lr_tensor, float beta1, float beta2, float eps, "
      "float step, Tensor? step_tensor, float weight_decay, bool decoupled, bool bias_correction, bool grad_averaging, "
      "bool trusts, float factor, Tensor? inv_scale, Tensor? clip, Tensor? found_inf) -> ()");
  m.def(
      "update_scale(Tensor(a!) state, Tensor found_inf, float growth_factor, float backoff_factor, int growth_interval, "
      "int hysteresis, float min_scale, float max_scale) -> ()");
  m.def("plan_launches(int[] sizes, int chunk_size, int max_tensors) -> Tensor");
  m.def("cpu_capability() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(ampkit, CPU, m) {
  m.impl("multi_tensor_scale", TORCH_BOX(&ampkit::multi_tensor_scale_cpu));
  m.impl("multi_tensor_axpby", TORCH_BOX(&ampkit::multi_tensor_axpby_cpu));
  m.impl("multi_tensor_join", TORCH_BOX(&ampkit::multi_tensor_join_cpu));
  m.impl("multi_tensor_split", TORCH_BOX(&ampkit::multi_tensor_split_cpu));
  m.impl("multi_tensor_unscale_l2norm", TORCH_BOX(&ampkit::multi_tensor_unscale_l2norm_cpu));
  m.impl("multi_tensor_sgd", TORCH_BOX(&ampkit::multi_tensor_sgd_cpu));
  m.impl("multi_tensor_adam", TORCH_BOX(&ampkit::multi_tensor_adam_cpu));
  m.impl("multi_tensor_adagrad", TORCH_BOX(&ampkit::multi_tensor_adagrad_cpu));
  m.impl("multi_tensor_novograd", TORCH_BOX(&ampkit::multi_tensor_novograd_cpu));
  m.impl("multi_tensor_lamb", TORCH_BOX(&ampkit::multi_tensor_lamb_cpu));
  m.impl("update_scale", TORCH_BOX(&ampkit::update_scale_cpu));
}

STABLE_TORCH_LIBRARY_IMPL(ampkit, CompositeExplicitAutograd, m) {
  m.impl("plan_launches", TORCH_BOX(&ampkit::plan_launches));
  m.impl("cpu_capability", TORCH_BOX(&ampkit::cpu_capability));
}

// Importing ampkit._C runs the registrations above; the module itself says what it was built with, and calls operators directly.
PyMODINIT_FUNC PyInit__C() {
  static PyMethodDef methods[] = {AMPKIT_DIRECT_METHODS(cpu, aoti_torch_device_type_cpu)};
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods};
  PyObject* module = PyModule_Create(&definition);
  if (module != nullptr) PyModule_AddStringConstant(module, "torch_version", TORCH_VERSION);
  return module;
}
