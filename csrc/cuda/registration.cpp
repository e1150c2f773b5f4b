// The CUDA column of the op x device matrix in ../registration.cpp, which must be loaded first: it owns the schemas.
#include <Python.h>
#include <torch/csrc/stable/library.h>
#include <torch/headeronly/version.h>

#include "direct.h"
#include "ops.h"

STABLE_TORCH_LIBRARY_IMPL(ampkit, CUDA, m) {
#define AMPKIT_IMPLEMENT(op) m.impl(#op, TORCH_BOX(&ampkit::op##_cuda));
  AMPKIT_OPERATORS(AMPKIT_IMPLEMENT)
}

PyMODINIT_FUNC PyInit__cuda() {
#define AMPKIT_METHOD(op) AMPKIT_DIRECT(op, cuda, aoti_torch_device_type_cuda),
  static PyMethodDef methods[] = {AMPKIT_OPERATORS(AMPKIT_METHOD) AMPKIT_OTHER_METHODS};
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_cuda", nullptr, -1, methods};
  PyObject* module = PyModule_Create(&definition);
  if (module != nullptr) PyModule_AddStringConstant(module, "torch_version", TORCH_VERSION);
  return module;
}
