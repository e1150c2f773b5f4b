// Operators called from Python without the dispatcher: methods of the libraries' modules, made of the functions of ops.h.
//
// For every tensor of a list the dispatcher makes an IValue, and the stable ABI a shared owner: on many small tensors that is
// more work than the arithmetic. A method reads the tensors in Python's objects. It returns NotImplemented, and does nothing,
// if the dispatcher is needed: for tensors that are not plain or not on the kernels' device, if
// a mode, transform, trace or profiler observes operators (tensor_access.h), and if the operator refuses its arguments (check.h).
//
//   method(written, *arguments)     written: bit k for argument k, whose tensors' versions count a write
#pragma once

#include <Python.h>

#include <array>
#include <exception>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "check.h"
#include "ops.h"
#include "tensor_access.h"

namespace ampkit {

// One for each library: set by its method use_tensor_access, before any other is called.
inline const TensorAccess* tensor_access = nullptr;

enum class Given { kFits, kNeedsDispatcher, kRaised };

// An argument of an operator, of the type that its function takes. Tensors are borrowed from Python: the caller holds their
// objects as long as the call lasts.
template <class Value>
struct Argument {
  Value value{};
  Given read(PyObject* object, int32_t, std::vector<AtenTensorHandle>*) {
    if constexpr (std::is_same_v<Value, bool>)
      value = PyObject_IsTrue(object) == 1;
    else if constexpr (std::is_same_v<Value, double>)
      value = PyFloat_AsDouble(object);
    else
      value = PyLong_AsLongLong(object);
    return PyErr_Occurred() ? Given::kRaised : Given::kFits;
  }
};

template <>
struct Argument<const std::string&> {
  std::string value;
  Given read(PyObject* object, int32_t, std::vector<AtenTensorHandle>*) {
    PyObject* bytes = PyUnicode_AsUTF8String(object);
    if (bytes == nullptr) return Given::kRaised;
    value = PyBytes_AsString(bytes);
    Py_DECREF(bytes);
    return Given::kFits;
  }
};

template <>
struct Argument<const std::vector<double>&> {
  std::vector<double> value;
  Given read(PyObject* object, int32_t, std::vector<AtenTensorHandle>*) {
    const bool is_tuple = PyTuple_Check(object);
    if (!is_tuple && !PyList_Check(object)) return Given::kNeedsDispatcher;
    value.resize(static_cast<size_t>(is_tuple ? PyTuple_Size(object) : PyList_Size(object)));
    for (size_t i = 0; i < value.size(); ++i) {
      value[i] = PyFloat_AsDouble(is_tuple ? PyTuple_GetItem(object, i) : PyList_GetItem(object, i));
      if (value[i] == -1.0 && PyErr_Occurred()) return Given::kRaised;
    }
    return Given::kFits;
  }
};

inline AtenTensorHandle plain_tensor_on(int32_t device_type, PyObject* object) {
  const AtenTensorHandle handle = tensor_access->plain_tensor(object);
  int32_t found = 0;
  if (handle == nullptr || aoti_torch_get_device_type(handle, &found) != AOTI_TORCH_SUCCESS) return nullptr;
  return found == device_type ? handle : nullptr;
}

template <>
struct Argument<const Tensor&> {
  Tensor value;
  Given read(PyObject* object, int32_t device_type, std::vector<AtenTensorHandle>* written) {
    const AtenTensorHandle handle = plain_tensor_on(device_type, object);
    if (handle == nullptr) return Given::kNeedsDispatcher;
    value = TensorView(handle).share();
    if (written != nullptr) written->push_back(handle);
    return Given::kFits;
  }
};

template <>
struct Argument<const MaybeTensor&> {
  MaybeTensor value;
  Given read(PyObject* object, int32_t device_type, std::vector<AtenTensorHandle>* written) {
    if (object == Py_None) return Given::kFits;
    Argument<const Tensor&> tensor;
    const Given given = tensor.read(object, device_type, written);
    if (given == Given::kFits) value = std::move(tensor.value);
    return given;
  }
};

// Adds the tensors of a list, or of a list of lists, one after the other.
inline bool add_plain_tensors(int32_t device_type, PyObject* object, std::vector<AtenTensorHandle>& handles) {
  const bool is_list = PyList_Check(object);
  if (!is_list && !PyTuple_Check(object)) return false;
  const Py_ssize_t size = is_list ? PyList_Size(object) : PyTuple_Size(object);
  handles.reserve(handles.size() + static_cast<size_t>(size));
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* item = is_list ? PyList_GetItem(object, i) : PyTuple_GetItem(object, i);
    if (const AtenTensorHandle handle = plain_tensor_on(device_type, item))
      handles.push_back(handle);
    else if (!add_plain_tensors(device_type, item, handles))
      return false;
  }
  return true;
}

template <>
struct Argument<const TensorList&> {
  TensorList value;
  Given read(PyObject* object, int32_t device_type, std::vector<AtenTensorHandle>* written) {
    std::vector<AtenTensorHandle> handles;
    if (!add_plain_tensors(device_type, object, handles)) return Given::kNeedsDispatcher;
    if (written != nullptr) written->insert(written->end(), handles.begin(), handles.end());
    value = TensorList::borrowed(std::move(handles));
    return Given::kFits;
  }
};

inline PyObject* python_object(const Tensor& tensor) { return tensor_access->wrap(tensor.get()); }

inline PyObject* python_object(const std::tuple<Tensor, Tensor>& tensors) {
  PyObject* first = python_object(std::get<0>(tensors));
  PyObject* second = python_object(std::get<1>(tensors));
  PyObject* pair = first != nullptr && second != nullptr ? PyTuple_Pack(2, first, second) : nullptr;
  Py_XDECREF(first);
  Py_XDECREF(second);
  return pair;
}

// Without the GIL, as under the dispatcher: kernels start threads, and copies may wait for a device.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

template <class Result, class... Types>
PyObject* call_directly(Result (*function)(Types...), int32_t device_type, PyObject* const* given) {
  long long mask = PyLong_AsLongLong(given[0]);
  if (mask == -1 && PyErr_Occurred()) return nullptr;
  std::tuple<Argument<Types>...> arguments;
  std::vector<AtenTensorHandle> written;
  Given state = Given::kFits;
  const auto read = [&](auto& argument) {
    if (state == Given::kFits) state = argument.read(*++given, device_type, mask & 1 ? &written : nullptr);
    mask >>= 1;
  };
  std::apply([&](auto&... each) { (read(each), ...); }, arguments);
  if (state == Given::kRaised) return nullptr;
  if (state == Given::kNeedsDispatcher) Py_RETURN_NOTIMPLEMENTED;
  const auto compute = [&] {
    const WithoutGil without;
    return std::apply([&](auto&... each) { return function(each.value...); }, arguments);
  };
  const auto count_writes = [&] {
    for (AtenTensorHandle handle : written) tensor_access->count_write(handle);
  };
  if constexpr (std::is_void_v<Result>) {
    compute();
    count_writes();
    Py_RETURN_NONE;
  } else {
    const Result result = compute();
    count_writes();
    return python_object(result);
  }
}

template <class Result, class... Types>
constexpr Py_ssize_t arity(Result (*)(Types...)) {
  return sizeof...(Types);
}

inline void hold(PyObject* object, std::vector<PyObject*>& held) {
  Py_INCREF(object);
  held.push_back(object);
  if (!PyList_Check(object)) return;
  const Py_ssize_t size = PyList_Size(object);
  const bool has_lists = size > 0 && PyList_Check(PyList_GetItem(object, 0));
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* item = PyList_GetItem(object, i);
    if (has_lists) {
      hold(item, held);
    } else {
      Py_INCREF(item);
      held.push_back(item);
    }
  }
}

// The method that Python calls. kDeviceType: the function that returns the type of the kernels' device.
template <auto kFunction, int32_t (*kDeviceType)()>
PyObject* direct_method(PyObject*, PyObject* const* given, Py_ssize_t count) {
  static const int32_t device_type = kDeviceType();
  if (count != arity(kFunction) + 1)
    return PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", arity(kFunction) + 1, count);
  // The first tensor shows whether the call is for another library.
  const bool has_first = PyList_Check(given[1]) && PyList_Size(given[1]) > 0;
  if (tensor_access == nullptr || !tensor_access->is_unobserved() ||
      (has_first && plain_tensor_on(device_type, PyList_GetItem(given[1], 0)) == nullptr)) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  // Other threads may release the lists and their tensors meanwhile.
  std::vector<PyObject*> held;
  for (Py_ssize_t i = 1; i < count; ++i) hold(given[i], held);
  PyObject* result = nullptr;
  try {
    result = call_directly(kFunction, device_type, given);
  } catch (const Refusal&) {
    Py_INCREF(Py_NotImplemented);
    result = Py_NotImplemented;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  for (PyObject* object : held) Py_DECREF(object);
  return result;
}

inline PyObject* use_tensor_access(PyObject*, PyObject* capsule) {
  tensor_access = static_cast<const TensorAccess*>(PyCapsule_GetPointer(capsule, kTensorAccess));
  if (tensor_access == nullptr) return nullptr;
  Py_RETURN_NONE;
}

}  // namespace ampkit

#define AMPKIT_DIRECT(op, device, device_type)                                                                             \
  {#op,                                                                                                                    \
   reinterpret_cast<PyCFunction>(                                                                                          \
       reinterpret_cast<void (*)()>(&ampkit::direct_method<&ampkit::op##_##device, &device_type>)),                        \
   METH_FASTCALL, nullptr}

// The other methods of a library's module, and the end of its table.
#define AMPKIT_OTHER_METHODS                                                                  \
  {"use_tensor_access", ampkit::use_tensor_access, METH_O, nullptr}, { nullptr, nullptr, 0, nullptr }
