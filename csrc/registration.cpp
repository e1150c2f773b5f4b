// The op x device matrix on one page: schemas first, then who implements them. The CUDA column is compiled into a
// library of its own (cuda/registration.cpp), because a CPU build of torch cannot load it.
//
// Only torch's stable ABI is used (torch/csrc/stable, torch/headeronly), so one binary serves torch 2.10 and newer.
#include <Python.h>
#include <torch/csrc/stable/library.h>
#include <torch/headeronly/version.h>

#include "ops.h"

STABLE_TORCH_LIBRARY(ampkit, m) {
  m.def("multi_tensor_scale(Tensor[] inputs, Tensor(a!)[] outputs, float scale, Tensor(b!)? found_inf) -> ()");
  m.def(
      "multi_tensor_axpby(Tensor[] xs, Tensor[] ys, Tensor(a!)[] outputs, float a, float b, Tensor(b!)? found_inf, "
      "int arg_to_check) -> ()");
  m.def("multi_tensor_l2norm(Tensor[] tensors, bool per_tensor) -> (Tensor, Tensor)");
  m.def("plan_launches(int[] sizes, int chunk_size, int max_tensors, int max_blocks) -> Tensor");
  m.def("cpu_capability() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(ampkit, CPU, m) {
  m.impl("multi_tensor_scale", TORCH_BOX(&ampkit::multi_tensor_scale_cpu));
  m.impl("multi_tensor_axpby", TORCH_BOX(&ampkit::multi_tensor_axpby_cpu));
  m.impl("multi_tensor_l2norm", TORCH_BOX(&ampkit::multi_tensor_l2norm_cpu));
}

STABLE_TORCH_LIBRARY_IMPL(ampkit, CompositeExplicitAutograd, m) {
  m.impl("plan_launches", TORCH_BOX(&ampkit::plan_launches));
  m.impl("cpu_capability", TORCH_BOX(&ampkit::cpu_capability));
}

// Importing ampkit._C runs the registrations above; the module itself only says what it was built with.
PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr};
  PyObject* module = PyModule_Create(&definition);
  if (module != nullptr) PyModule_AddStringConstant(module, "torch_version", TORCH_VERSION);
  return module;
}
