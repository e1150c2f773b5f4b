// The CUDA column of the op x device matrix in ../registration.cpp, which must be loaded first: it owns the schemas.
#include <Python.h>
#include <torch/csrc/stable/library.h>
#include <torch/headeronly/version.h>

#include "direct.h"
#include "ops.h"

STABLE_TORCH_LIBRARY_IMPL(ampkit, CUDA, m) {
  m.impl("multi_tensor_scale", TORCH_BOX(&ampkit::multi_tensor_scale_cuda));
  m.impl("multi_tensor_axpby", TORCH_BOX(&ampkit::multi_tensor_axpby_cuda));
  m.impl("multi_tensor_join", TORCH_BOX(&ampkit::multi_tensor_join_cuda));
  m.impl("multi_tensor_split", TORCH_BOX(&ampkit::multi_tensor_split_cuda));
  m.impl("multi_tensor_unscale_l2norm", TORCH_BOX(&ampkit::multi_tensor_unscale_l2norm_cuda));
  m.impl("multi_tensor_sgd", TORCH_BOX(&ampkit::multi_tensor_sgd_cuda));
  m.impl("multi_tensor_adam", TORCH_BOX(&ampkit::multi_tensor_adam_cuda));
  m.impl("multi_tensor_adagrad", TORCH_BOX(&ampkit::multi_tensor_adagrad_cuda));
  m.impl("multi_tensor_novograd", TORCH_BOX(&ampkit::multi_tensor_novograd_cuda));
  m.impl("multi_tensor_lamb", TORCH_BOX(&ampkit::multi_tensor_lamb_cuda));
  m.impl("update_scale", TORCH_BOX(&ampkit::update_scale_cuda));
}

PyMODINIT_FUNC PyInit__cuda() {
  static PyMethodDef methods[] = {AMPKIT_DIRECT_METHODS(cuda, aoti_torch_device_type_cuda)};
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_cuda", nullptr, -1, methods};
  PyObject* module = PyModule_Create(&definition);
  if (module != nullptr) PyModule_AddStringConstant(module, "torch_version", TORCH_VERSION);
  return module;
}
