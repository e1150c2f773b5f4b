// ampkit._casting: O1's wrappers in C++. They read torch's own structures through its C++ headers. So unlike the kernels
// this library serves only the torch that it was built with, and raises an error when it is imported under another.
#include <Python.h>

#include <cstring>

#ifndef AMPKIT_BUILT_WITH_TORCH
#error "setup.py defines AMPKIT_BUILT_WITH_TORCH: torch.__version__, local part included"
#endif

namespace ampkit {
extern PyTypeObject CastStoreType;
extern PyTypeObject SwitchType;
extern PyTypeObject CallType;
PyObject* make_tensor_access();
bool add_narrow_gradients(PyObject* module);
bool add_reach(PyObject* module);
}  // namespace ampkit

namespace {

bool is_the_torch_it_was_built_with() {
  PyObject* torch = PyImport_ImportModule("torch");
  if (torch == nullptr) return false;
  PyObject* version = PyObject_GetAttrString(torch, "__version__");
  Py_DECREF(torch);
  const char* text = version == nullptr ? nullptr : PyUnicode_AsUTF8(version);
  const bool same = text != nullptr && std::strcmp(text, AMPKIT_BUILT_WITH_TORCH) == 0;
  if (text != nullptr && !same) {
    PyErr_Format(PyExc_ImportError, "it was built with torch " AMPKIT_BUILT_WITH_TORCH ", and this is torch %s", text);
  }
  Py_XDECREF(version);
  return same;
}

}  // namespace

PyMODINIT_FUNC PyInit__casting() {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_casting", nullptr, -1, nullptr};
  if (!is_the_torch_it_was_built_with()) return nullptr;
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr) return nullptr;
  if (PyModule_AddStringConstant(module, "torch_version", AMPKIT_BUILT_WITH_TORCH) < 0 ||
      PyModule_AddType(module, &ampkit::CastStoreType) < 0 || PyModule_AddType(module, &ampkit::SwitchType) < 0 ||
      PyModule_AddType(module, &ampkit::CallType) < 0 || !ampkit::add_narrow_gradients(module) ||
      !ampkit::add_reach(module)) {
    Py_DECREF(module);
    return nullptr;
  }
  PyObject* access = ampkit::make_tensor_access();
  if (access == nullptr || PyModule_AddObjectRef(module, "tensor_access", access) < 0) {
    Py_XDECREF(access);
    Py_DECREF(module);
    return nullptr;
  }
  Py_DECREF(access);
  return module;
}
