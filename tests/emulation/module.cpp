// The Python module ampkit_emulated. Importing it puts the CUDA drivers in the place of ampkit/_C's CPU kernels, because
// csrc/cuda/registration.cpp is in the same library, with the key CPU. ampkit/_C must be loaded before, as before ampkit/_cuda.
#include <Python.h>

#include "module.h"

// What the sanitizer asks for its settings.
extern "C" __attribute__((visibility("default"))) const char* __ubsan_default_options() {
  return "abort_on_error=1";
}

PyMODINIT_FUNC PyInit__cuda();

namespace {

PyObject* launches(PyObject*, PyObject*) { return PyLong_FromLongLong(emulation::launches()); }

PyObject* blocks(PyObject*, PyObject*) { return PyLong_FromLongLong(emulation::blocks()); }

PyObject* seed(PyObject*, PyObject* value) {
  const unsigned long long number = PyLong_AsUnsignedLongLong(value);
  if (PyErr_Occurred()) return nullptr;
  emulation::seed(number);
  Py_RETURN_NONE;
}

PyObject* run_broken(PyObject*, PyObject* name) {
  PyObject* bytes = PyUnicode_AsUTF8String(name);
  if (bytes == nullptr) return nullptr;
  const bool known = emulation::run_broken(PyBytes_AsString(bytes));
  Py_DECREF(bytes);
  return PyBool_FromLong(known);
}

PyObject* hand_over(PyObject*, PyObject* machines) {
  if (!PyArg_ParseTuple(machines, "OO", &emulation::begin, &emulation::end)) return nullptr;
  Py_INCREF(emulation::begin);
  Py_INCREF(emulation::end);
  emulation::watch_memory();
  Py_RETURN_NONE;
}

PyObject* allocation(PyObject*, PyObject* address) {
  const size_t at = PyLong_AsSize_t(address);
  if (PyErr_Occurred()) return nullptr;
  const auto [base, size] = emulation::allocation_of(at);
  if (size == 0) Py_RETURN_NONE;
  return Py_BuildValue("KK", static_cast<unsigned long long>(base), static_cast<unsigned long long>(size));
}

PyMethodDef methods[] = {
    {"launches", launches, METH_NOARGS, "How many kernels were launched since the library was loaded."},
    {"blocks", blocks, METH_NOARGS, "How many blocks these had."},
    {"seed", seed, METH_O, "Begin anew with the random order of threads, from this number."},
    {"hand_over", hand_over, METH_VARARGS,
     "Call the first function for every launch from now on, with entry, parameters, blocks, threads and bytes of shared memory, and the"
     " second after the threads here have run too. Memory is filled with a number when it is allocated."},
    {"allocation", allocation, METH_O, "Where memory that torch has allocated since then begins, and its bytes; None elsewhere."},
    {"run_broken", run_broken, METH_O, "Launch a kernel of broken.cu, which must end the process; False if there is none."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyMODINIT_FUNC PyInit_ampkit_emulated() {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "ampkit_emulated", nullptr, -1, methods};
  PyObject* module = PyModule_Create(&definition);
  // What csrc/cuda/registration.cpp makes: the operators, called directly.
  PyObject* kernels = module == nullptr ? nullptr : PyInit__cuda();
  if (kernels == nullptr || PyModule_AddObjectRef(module, "kernels", kernels) < 0) {
    Py_XDECREF(kernels);
    Py_XDECREF(module);
    return nullptr;
  }
  Py_DECREF(kernels);
  return module;
}
