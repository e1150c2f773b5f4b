#include "call.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SequenceNumber.h>
#include <ATen/ops/to_ops.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Size.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <utility>

#include "shared_cast.h"
#include "weight_casts.h"

namespace ampkit {

namespace {

constexpr Py_ssize_t kMaxArguments = 24;  // calls with more go to Python
constexpr size_t kMaxMethods = 512;

Call* call_of(PyObject* object) { return reinterpret_cast<Call*>(object); }

bool is_tensor(PyObject* object) { return THPVariable_CheckTypeExact(Py_TYPE(object)); }

bool is_lower_precision(at::ScalarType dtype) {
  return dtype == at::ScalarType::Half || dtype == at::ScalarType::BFloat16;
}

bool is_castable(at::ScalarType dtype) { return dtype == at::ScalarType::Float || is_lower_precision(dtype); }

// Dtypes that a call in lower precision must not be mixed with.
bool is_exact(at::ScalarType dtype) { return dtype == at::ScalarType::Double || at::isComplexType(dtype); }

bool is_subclass_of_tensor(PyObject* object) {
  return PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(THPVariableClass));
}

// Numbers, strings, and tuples and lists of numbers: nothing in them is ever cast.
bool holds_no_tensors(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  if (object == Py_None || type == &PyLong_Type || type == &PyBool_Type || type == &PyFloat_Type ||
      type == &PyUnicode_Type || type == &THPSizeType) {
    return true;
  }
  if (type == &PyTuple_Type) {
    return PyTuple_GET_SIZE(object) == 0 || Py_TYPE(PyTuple_GET_ITEM(object, 0)) == &PyLong_Type;
  }
  if (type == &PyList_Type) {
    return PyList_GET_SIZE(object) == 0 || Py_TYPE(PyList_GET_ITEM(object, 0)) == &PyLong_Type;
  }
  return false;
}

// Whether a mode of torch function or of dispatch, or a transform of torch.func, is active: Python handles these.
bool is_watched(const ThreadKeys& thread) {
  constexpr c10::DispatchKeySet watchers(
      {c10::DispatchKey::Python, c10::DispatchKey::FuncTorchDynamicLayerFrontMode});
  return thread.included().has_any(watchers) || at::impl::PythonTorchFunctionTLS::stack_len() > 0;
}

// Any sparse layout.
bool is_sparse(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return impl->is_sparse() || impl->is_sparse_compressed();
}

enum class Verdict { Through, Cast, Slow };

// The verdict on a call; `to_cast` gets a bit for each argument to cast.
Verdict judge(const Binding* binding, PyObject* const* args, Py_ssize_t nargs, Py_ssize_t total, uint32_t& to_cast) {
  at::ScalarType first = at::ScalarType::Undefined;
  bool mixed = false;
  for (Py_ssize_t i = 0; i < total; ++i) {
    if (!is_tensor(args[i])) {
      if (holds_no_tensors(args[i])) continue;
      if (binding->kind == Kind::MatchFirst && i > 0 && !is_subclass_of_tensor(args[i])) continue;
      return Verdict::Slow;
    }
    const at::ScalarType dtype = THPVariable_Unpack(args[i]).scalar_type();
    switch (binding->kind) {
      case Kind::Native:
        break;
      case Kind::Lower:
        if (is_exact(dtype)) return Verdict::Through;
        if (is_sparse(THPVariable_Unpack(args[i]))) return Verdict::Slow;
        if (dtype != binding->target && is_castable(dtype)) to_cast |= 1u << i;
        break;
      case Kind::Fp32:
        if (is_lower_precision(dtype)) to_cast |= 1u << i;
        break;
      case Kind::Promote:
        if (!at::isFloatingType(dtype) && !at::isComplexType(dtype)) break;
        mixed |= first != at::ScalarType::Undefined && dtype != first;
        first = dtype;
        break;
      case Kind::MatchFirst:
        if (i == 0) {
          if (!is_castable(dtype)) return Verdict::Through;
          first = dtype;
        }
        mixed |= is_castable(dtype) && dtype != first;
        break;
      case Kind::Reject:
        if (i == 0 && nargs > 0) return dtype == at::ScalarType::Half ? Verdict::Slow : Verdict::Through;
        mixed = true;  // given by keyword
        break;
      case Kind::Banned:
        mixed |= is_lower_precision(dtype);
        break;
    }
  }
  if (to_cast != 0) return Verdict::Cast;
  return mixed ? Verdict::Slow : Verdict::Through;
}

bool has_out(PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kwnames); ++i) {
    if (args[nargs + i] != Py_None && PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(kwnames, i), "out") == 0) {
      return true;
    }
  }
  return false;
}

at::Tensor convert(const at::Tensor& tensor, at::ScalarType dtype) {
  pybind11::gil_scoped_release without_gil;
  return at::_ops::to_dtype::call(tensor, dtype, /*non_blocking=*/false, /*copy=*/false, std::nullopt);
}

// Second references to the arguments of a call: see WeightCast.held.
using Held = c10::SmallVector<at::Tensor, 4>;

// Products save their factors for the backward pass, and one of them several times.
void hold(const Binding* binding, PyObject* const* args, Py_ssize_t nargs, Held& held) {
  if (binding->kind != Kind::Lower) return;
  for (Py_ssize_t i = 0; i < nargs; ++i) {
    if (!is_tensor(args[i])) continue;
    const at::Tensor& tensor = THPVariable_Unpack(args[i]);
    if (tensor.use_count() == 1) held.push_back(tensor);
  }
}

// A weight's cast in the store, borrowed, or null: most calls need no more. `cast` handles all that may throw.
PyObject* find_on_cpu(const Binding* binding, PyObject* argument) {
  if (binding->kind != Kind::Lower || Py_TYPE(argument) != reinterpret_cast<PyTypeObject*>(ParameterClass)) {
    return nullptr;
  }
  CastStore* store = binding->store.get();
  if (store->bypassed || !store->capturing.is_none() || !THPVariable_Unpack(argument).is_cpu()) return nullptr;
  return store->find(argument);
}

// A new reference to the cast of one argument (to itself, if its device is not cast), or null with an exception.
PyObject* cast(const Binding* binding, PyObject* argument, Held& held) {
  HANDLE_TH_ERRORS
  const at::Tensor& tensor = THPVariable_Unpack(argument);
  if (binding->kind == Kind::Lower) {
    const bool is_weight = Py_TYPE(argument) == reinterpret_cast<PyTypeObject*>(ParameterClass);
    // Scripts edit leaves through .data, which torch does not count, but not results of autograd.
    const bool is_activation = !is_weight && c10::GradMode::is_enabled() && !tensor.is_leaf();
    if (is_weight || is_activation) {
      const bool bypassed = is_bypassed(*binding->store);
      if (is_weight) {
        if (bypassed || !is_plain_weight(tensor)) return PyObject_CallOneArg(binding->cast_weight.ptr(), argument);
        if (!is_on_our_device(*binding->control, tensor)) return Py_NewRef(argument);
        return make_weight_cast(binding->store.get(), argument, binding->target);
      }
      if (!bypassed && !tensor.is_inference() && !in_forward_mode()) {
        at::Tensor found = binding->store->find_recent(tensor);
        if (found.defined()) {
          const uint64_t order = at::sequence_number::get_and_increment();
          return THPVariable_Wrap(held.emplace_back(another_use_of(tensor, found, order)));
        }
        if (!is_on_our_device(*binding->control, tensor)) return Py_NewRef(argument);
        const uint32_t version = version_of(tensor);
        at::Tensor made = convert(tensor, binding->target);
        binding->store->keep_recent(tensor, made, version);
        return THPVariable_Wrap(held.emplace_back(std::move(made)));
      }
    }
  }
  if (!is_on_our_device(*binding->control, tensor)) return Py_NewRef(argument);
  return THPVariable_Wrap(held.emplace_back(convert(tensor, binding->target)));
  END_HANDLE_TH_ERRORS
}

// Arguments that were cast, and the references to them.
struct Arguments {
  PyObject* values[kMaxArguments + 1];
  PyObject* owned[kMaxArguments];
  Py_ssize_t count = 0;
  Held held;

  ~Arguments() {
    for (Py_ssize_t i = 0; i < count; ++i) Py_DECREF(owned[i]);
  }
};

void release(Binding* binding) {
  if (binding != nullptr && --binding->references == 0) delete binding;
}

// Keeps alive what a call needs, even if the Call is unbound meanwhile.
struct InUse {
  PyObject* original;
  Binding* binding;

  explicit InUse(Call* call) : original(Py_NewRef(call->original)), binding(call->binding) {
    if (binding != nullptr) ++binding->references;
  }
  ~InUse() {
    Py_DECREF(original);
    release(binding);
  }
  InUse(const InUse&) = delete;
  InUse& operator=(const InUse&) = delete;
};

// The tables have decided the casts of a call of torch: torch.autocast must not cast the arguments again by its own lists.
// But a function written in Python that was given lower precision calls others, which have rows of their own.
struct PastAutocast {
  PastAutocast(const Binding* binding, ThreadKeys& thread)
      : control(binding->control.get()), thread(thread), added(keys(binding) - thread.excluded()) {
    thread.set_excluded(thread.excluded() | added);
  }
  ~PastAutocast() {
    thread.set_excluded(thread.excluded() - added);
    if (control->installed) return;
    // A session ended during the call: casting, which it switched off, stays off.
    for (c10::DeviceType type : control->known) at::autocast::set_autocast_enabled(type, false);
  }
  PastAutocast(const PastAutocast&) = delete;
  PastAutocast& operator=(const PastAutocast&) = delete;

  const Switch* control;
  ThreadKeys& thread;
  const c10::DispatchKeySet added;

 private:
  static c10::DispatchKeySet keys(const Binding* binding) {
    return !binding->follows_regions || binding->is_builtin ? binding->control->keys : c10::DispatchKeySet();
  }
};

// "Where the tables hold" in ampkit/models/NOTES.md: whether Python has to look at such a call.
bool may_hold_lower_precision(PyObject* const* args, Py_ssize_t total) {
  for (Py_ssize_t i = 0; i < total; ++i) {
    if (is_tensor(args[i]) ? is_lower_precision(THPVariable_Unpack(args[i]).scalar_type())
                           : !holds_no_tensors(args[i])) {
      return true;
    }
  }
  return false;
}

PyObject* run(Call* call, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  const InUse use(call);
  const Binding* binding = use.binding;
  ThreadKeys& thread = keys_of_this_thread();
  // A subclass must see a call of torch's own method, which Python arranges.
  const bool is_subclass = nargs > 0 && !is_tensor(args[0]) && is_subclass_of_tensor(args[0]);
  const Py_ssize_t total = nargs + (kwnames != nullptr ? PyTuple_GET_SIZE(kwnames) : 0);
  if (binding == nullptr || !is_on(*binding->control, thread)) {
    const bool is_slow = binding != nullptr && (is_subclass || is_left_on(*binding->control, thread) ||
                                                (binding->control->stores && may_hold_lower_precision(args, total)));
    return PyObject_Vectorcall(is_slow ? binding->slow.ptr() : use.original, args, static_cast<size_t>(nargs), kwnames);
  }
  uint32_t to_cast = 0;
  Verdict verdict = binding->kind == Kind::Native && !is_subclass ? Verdict::Through : Verdict::Slow;
  if (verdict == Verdict::Slow && total <= kMaxArguments && !is_watched(thread) &&
      (kwnames == nullptr || !has_out(args, nargs, kwnames)) &&
      !(binding->follows_regions && wants_other_precision(*binding->control))) {
    verdict = judge(binding, args, nargs, total, to_cast);
  }
  if (verdict == Verdict::Slow) return PyObject_Vectorcall(binding->slow.ptr(), args, static_cast<size_t>(nargs), kwnames);
  if (verdict == Verdict::Through) {
    Held held;
    hold(binding, args, nargs, held);
    const PastAutocast past_autocast(binding, thread);
    return PyObject_Vectorcall(use.original, args, static_cast<size_t>(nargs), kwnames);
  }
  Arguments arguments;
  std::memcpy(arguments.values + 1, args, static_cast<size_t>(total) * sizeof(PyObject*));
  for (Py_ssize_t i = 0; i < total; ++i) {
    if ((to_cast >> i & 1u) == 0) continue;
    PyObject* found = find_on_cpu(binding, args[i]);
    PyObject* value = found != nullptr ? Py_NewRef(found) : cast(binding, args[i], arguments.held);
    if (value == nullptr) return nullptr;
    arguments.owned[arguments.count++] = value;
    arguments.values[i + 1] = value;
  }
  hold(binding, arguments.values + 1, nargs, arguments.held);
  const PastAutocast past_autocast(binding, thread);
  return PyObject_Vectorcall(
      use.original, arguments.values + 1, static_cast<size_t>(nargs) | PY_VECTORCALL_ARGUMENTS_OFFSET, kwnames);
}

PyObject* as_function(PyObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  return run(call_of(self), args, nargs, kwnames);
}

PyObject* as_method(Call* call, PyObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  const Py_ssize_t total = nargs + (kwnames != nullptr ? PyTuple_GET_SIZE(kwnames) : 0);
  c10::SmallVector<PyObject*, kMaxArguments> joined(1, self);
  joined.append(args, args + total);
  return run(call, joined.data(), nargs + 1, kwnames);
}

// A method descriptor passes no state to its C function, so each one has a function of its own.
Call* methods[kMaxMethods];
size_t methods_made = 0;

template <size_t I>
PyObject* trampoline(PyObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  return as_method(methods[I], self, args, nargs, kwnames);
}

using FastFunction = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*);

template <size_t... I>
constexpr std::array<FastFunction, sizeof...(I)> make_trampolines(std::index_sequence<I...>) {
  return {&trampoline<I>...};
}

constexpr auto trampolines = make_trampolines(std::make_index_sequence<kMaxMethods>());

PyCFunction as_method_pointer(FastFunction function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyObject* call_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* keywords[] = {"name", "module", "doc", "original", nullptr};
  PyObject *name, *module, *doc, *original;
  if (!PyArg_ParseTupleAndKeywords(
          args, kwargs, "UUOO:Call", const_cast<char**>(keywords), &name, &module, &doc, &original)) {
    return nullptr;
  }
  const char* text = doc == Py_None ? nullptr : PyUnicode_AsUTF8(doc);
  const char* name_text = PyUnicode_AsUTF8(name);
  if (name_text == nullptr || (doc != Py_None && text == nullptr)) return nullptr;
  auto* self = reinterpret_cast<Call*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->definition = {name_text, as_method_pointer(&as_function), METH_FASTCALL | METH_KEYWORDS, text};
  self->name = Py_NewRef(name);
  self->module = Py_NewRef(module);
  self->doc = Py_NewRef(doc);
  self->original = Py_NewRef(original);
  return reinterpret_cast<PyObject*>(self);
}

PyObject* call_unbind(PyObject* object, PyObject*) {
  release(std::exchange(call_of(object)->binding, nullptr));
  Py_RETURN_NONE;
}

void call_dealloc(PyObject* object) {
  Call* self = call_of(object);
  Py_XDECREF(call_unbind(object, nullptr));
  Py_CLEAR(self->name);
  Py_CLEAR(self->module);
  Py_CLEAR(self->doc);
  Py_CLEAR(self->original);
  Py_TYPE(object)->tp_free(object);
}

PyObject* call_bind(PyObject* object, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  static const char* keywords[] = {"kind", "original", "control", "slow",
                                   "target", "store", "cast_weight", nullptr};
  const char* kind_name;
  PyObject *original, *control, *slow, *dtype, *store = Py_None, *cast_weight = Py_None;
  if (!PyArg_ParseTupleAndKeywords(
          args, kwargs, "sOOOO!|OO:bind", const_cast<char**>(keywords), &kind_name, &original, &control, &slow,
          &THPDtypeType, &dtype, &store, &cast_weight)) {
    return nullptr;
  }
  static const std::pair<const char*, Kind> kinds[] = {
      {"LOWER_PRECISION_FP", Kind::Lower}, {"BFLOAT16", Kind::Lower}, {"FP32", Kind::Fp32}, {"PROMOTE", Kind::Promote},
      {"MATCH_FIRST", Kind::MatchFirst}, {"REJECT", Kind::Reject}, {"BANNED", Kind::Banned}, {"NATIVE", Kind::Native}};
  const auto* kind = std::find_if(
      std::begin(kinds), std::end(kinds), [&](const auto& item) { return std::strcmp(item.first, kind_name) == 0; });
  if (kind == std::end(kinds)) {
    PyErr_Format(PyExc_ValueError, "no kind is called %s", kind_name);
    return nullptr;
  }
  auto binding = std::make_unique<Binding>();
  binding->kind = kind->second;
  binding->follows_regions = std::strcmp(kind_name, "LOWER_PRECISION_FP") == 0;
  binding->is_builtin = !PyFunction_Check(original);
  binding->target = reinterpret_cast<THPDtype*>(dtype)->scalar_type;
  binding->control = pybind11::cast<std::shared_ptr<Switch>>(pybind11::handle(control));
  binding->slow = pybind11::reinterpret_borrow<pybind11::object>(slow);
  if (binding->kind == Kind::Lower) {
    binding->store = pybind11::cast<std::shared_ptr<CastStore>>(pybind11::handle(store));
  }
  binding->cast_weight = pybind11::reinterpret_borrow<pybind11::object>(cast_weight);
  Call* self = call_of(object);
  release(std::exchange(self->binding, binding.release()));
  Py_SETREF(self->original, Py_NewRef(original));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* call_function(PyObject* object, PyObject*) {
  Call* self = call_of(object);
  return PyCFunction_NewEx(&self->definition, object, self->module);
}

PyObject* call_method(PyObject* object, PyObject* type) {
  if (!PyType_Check(type)) {
    PyErr_SetString(PyExc_TypeError, "method() takes the class that the method is for");
    return nullptr;
  }
  if (methods_made == kMaxMethods) Py_RETURN_NONE;
  Call* self = call_of(object);
  methods[methods_made] = reinterpret_cast<Call*>(Py_NewRef(object));
  self->definition.ml_meth = as_method_pointer(trampolines[methods_made++]);
  return PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type), &self->definition);
}

// A C function with a `self` is pickled as getattr(self, name): here self is the module in which it is found.
PyObject* call_reduce(PyObject* object, PyObject*) {
  PyObject* importlib = PyImport_ImportModule("importlib");
  if (importlib == nullptr) return nullptr;
  PyObject* import_module = PyObject_GetAttrString(importlib, "import_module");
  Py_DECREF(importlib);
  return import_module == nullptr ? nullptr : Py_BuildValue("N(O)", import_module, call_of(object)->module);
}

PyMethodDef call_methods[] = {
    {"bind", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call_bind)), METH_VARARGS | METH_KEYWORDS,
     "Casts from now on, as the engine that owns ``control`` says."},
    {"unbind", call_unbind, METH_NOARGS, "Calls straight through from now on."},
    {"function", call_function, METH_NOARGS, "A function to stand in a module."},
    {"method", call_method, METH_O, "A method to stand in a class, or None when there are too many already."},
    {"__reduce__", call_reduce, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyTypeObject make_call_type() {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "ampkit._casting.Call";
  type.tp_basicsize = sizeof(Call);
  type.tp_flags = Py_TPFLAGS_DEFAULT;
  type.tp_doc = "Call(name, module, doc, original): a wrapper around one function of torch.";
  type.tp_new = call_new;
  type.tp_dealloc = call_dealloc;
  type.tp_methods = call_methods;
  return type;
}

PyTypeObject call_type = make_call_type();

}  // namespace

void add_call(pybind11::module_& module) {
  if (PyModule_AddType(module.ptr(), &call_type) < 0) throw pybind11::error_already_set();
}

}  // namespace ampkit
