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
      "Tensor? b_tensor, int arg_to_check, Tensor(b!)? found_inf, Tensor(c!)? first_bad) -> ()");
  m.def("multi_tensor_join(Tensor[] weights, Tensor[] rests, Tensor(a!)[] outputs) -> ()");
  m.def("multi_tensor_split(Tensor[] values, Tensor(a!)[] weights, Tensor(b!)[] rests) -> ()");
  m.def(
      "multi_tensor_unscale_l2norm(Tensor[] inputs, Tensor(a!)[] outputs, float inv_scale, Tensor? inv_scale_tensor, "
      "bool per_tensor, Tensor(b!)? found_inf, Tensor(c!)? first_bad) -> (Tensor, Tensor)");
  m.def(
      "multi_tensor_step(str rule, Tensor[] grads, Tensor(a!)[] written, float[] settings, Tensor? lr, Tensor? step, "
      "Tensor? inv_scale, Tensor? clip, Tensor? found_inf, Tensor? each, Tensor? positions) -> ()");
  m.def(
      "update_scale(Tensor(a!) state, Tensor found_inf, float growth_factor, float backoff_factor, int growth_interval, "
      "int hysteresis, float min_scale, float max_scale) -> ()");
  m.def("cpu_capability() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(ampkit, CPU, m) {
#define AMPKIT_IMPLEMENT(op) m.impl(#op, TORCH_BOX(&ampkit::op##_cpu));
  AMPKIT_OPERATORS(AMPKIT_IMPLEMENT)
}

STABLE_TORCH_LIBRARY_IMPL(ampkit, CompositeExplicitAutograd, m) {
  m.impl("cpu_capability", TORCH_BOX(&ampkit::cpu_capability));
}

// Importing ampkit._C runs the registrations above. The module itself says with what it was built, and calls operators directly.
PyMODINIT_FUNC PyInit__C() {
#define AMPKIT_METHOD(op) AMPKIT_DIRECT(op, cpu, aoti_torch_device_type_cpu),
  static PyMethodDef methods[] = {AMPKIT_OPERATORS(AMPKIT_METHOD) AMPKIT_OTHER_METHODS};
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods};
  PyObject* module = PyModule_Create(&definition);
  if (module != nullptr) PyModule_AddStringConstant(module, "torch_version", TORCH_VERSION);
  return module;
}
