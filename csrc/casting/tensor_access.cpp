// ampkit._casting.tensor_access: see ../tensor_access.h.
#include "../tensor_access.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/python_variable.h>

#include <pybind11/pybind11.h>

namespace ampkit {

namespace {

at::Tensor& tensor_of(AtenTensorHandle handle) { return *reinterpret_cast<at::Tensor*>(handle); }

bool is_unobserved() {
  const c10::DispatchKeySet included = c10::impl::tls_local_dispatch_key_set().included_;
  return (included - c10::autocast_dispatch_keyset - c10::default_included_set).empty() &&
      !c10::impl::TorchDispatchModeTLS::any_modes_set() && at::impl::PythonTorchFunctionTLS::stack_len() == 0 &&
      !at::hasCallbacks();
}

// Whether the class of this tensor overrides functions of torch. Parameters do not, nor do their subclasses that
// inherit this.
bool has_torch_function(PyObject* tensor) {
  static PyObject* const name = PyUnicode_InternFromString("__torch_function__");
  static PyObject* const nothing = PyObject_GetAttr(ParameterClass, name);
  PyObject* function = PyObject_GetAttr(reinterpret_cast<PyObject*>(Py_TYPE(tensor)), name);
  if (function == nullptr) PyErr_Clear();
  Py_XDECREF(function);
  return function == nullptr || function != nothing;
}

AtenTensorHandle plain_tensor(PyObject* object) {
  if (!THPVariable_CheckExact(object) && (!THPVariable_Check(object) || has_torch_function(object))) return nullptr;
  const at::Tensor& tensor = THPVariable_Unpack(object);
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  static const uint64_t plain = (c10::DispatchKeySet({c10::DispatchKey::Dense, c10::DispatchKey::AutogradFunctionality,
                                                   c10::DispatchKey::ADInplaceOrView}) |
                              c10::autocast_dispatch_keyset)
                                 .raw_repr() |
      c10::full_backend_mask;
  // Inference tensors count no writes.
  const bool is_plain = (impl->key_set().raw_repr() & ~plain) == 0 && impl->has_storage() && !impl->is_inference();
  return is_plain ? reinterpret_cast<AtenTensorHandle>(const_cast<at::Tensor*>(&tensor)) : nullptr;
}

PyObject* wrap(AtenTensorHandle handle) { return THPVariable_Wrap(tensor_of(handle)); }

void count_write(AtenTensorHandle handle) { tensor_of(handle).unsafeGetTensorImpl()->bump_version(); }

const TensorAccess access = {is_unobserved, plain_tensor, wrap, count_write};

}  // namespace

void add_tensor_access(pybind11::module_& module) {
  module.attr("tensor_access") = pybind11::capsule(&access, kTensorAccess);
}

}  // namespace ampkit
