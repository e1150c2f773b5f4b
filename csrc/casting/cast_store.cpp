#include "cast_store.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <structmember.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/object_ptr.h>

#include <algorithm>
#include <new>

namespace ampkit {

uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

namespace {

// Where kernels on the tensor are queued now. Another stream would read a cast before it is written.
c10::StreamId stream_of(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return 0;
  return c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device()).id();
}

const void* data_of(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl()->data(); }

// Frees tensors, which lets other threads run.
void release(WeightCast& entry) {
  Py_XDECREF(entry.weight);
  Py_XDECREF(entry.cast);
}

// The map is emptied first: releasing a cast may run Python code that comes back to it.
void release_all(WeightCasts& casts) {
  WeightCasts doomed;
  doomed.swap(casts);
  for (auto& item : doomed) release(item.second);
}

void take_out(WeightCasts& casts, WeightCasts::iterator place) {
  if (place == casts.end()) return;
  WeightCast doomed = std::move(place->second);
  casts.erase(place);
  release(doomed);
}

template <typename Do>
void for_each_map(CastStore* store, Do&& act) {
  for (WeightCasts* casts : {&store->with_grad, &store->without_grad, &store->in_inference}) act(*casts);
}

void forget_last_used(CastStore* store) {
  std::vector<PyObject*> doomed;
  doomed.swap(store->last_used);
  for (PyObject* reference : doomed) Py_DECREF(reference);
}

// The callback of the weak references to weights: the address may belong to another weight by now.
PyObject* discard(PyObject* store, PyObject* reference) {
  for_each_map(reinterpret_cast<CastStore*>(store), [&](WeightCasts& casts) {
    take_out(casts, std::find_if(casts.begin(), casts.end(), [&](const auto& item) { return item.second.weight == reference; }));
  });
  Py_RETURN_NONE;
}

PyMethodDef discard_definition = {"discard", discard, METH_O, nullptr};

}  // namespace

RecentCast::RecentCast()
    : activation(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()),
      cast(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()) {}

WeightCasts& CastStore::of_this_mode() {
  if (c10::GradMode::is_enabled()) return with_grad;
  return c10::InferenceMode::is_enabled() ? in_inference : without_grad;
}

PyObject* CastStore::find(PyObject* weight) {
  WeightCasts& casts = of_this_mode();
  auto found = casts.find(weight);
  if (found == casts.end()) return nullptr;
  WeightCast& entry = found->second;
  const at::Tensor& tensor = THPVariable_Unpack(weight);
  const bool holds = referent(entry.weight).get() == weight && version_of(tensor) == entry.stamp.version &&
      data_of(tensor) == entry.stamp.data && tensor.requires_grad() == entry.stamp.requires_grad &&
      stream_of(tensor) == entry.stream && version_of(entry.held) == entry.cast_version;
  if (!holds) return nullptr;
  entry.used = true;
  return entry.cast;
}

Stamp CastStore::stamp(const at::Tensor& weight) const {
  return {generation, version_of(weight), data_of(weight), weight.requires_grad()};
}

bool CastStore::keep(PyObject* weight, PyObject* cast, const Stamp& made_of, bool used) {
  if (on_death == nullptr) {
    PyObject* callback = PyCFunction_New(&discard_definition, reinterpret_cast<PyObject*>(this));
    if (callback == nullptr) return false;
    Py_XSETREF(on_death, callback);  // making it may have collected garbage, and that come here
  }
  const at::Tensor& tensor = THPVariable_Unpack(weight);
  c10::Storage storage = tensor.storage();
  PyObject* reference = PyWeakref_NewRef(weight, on_death);
  if (reference == nullptr) return false;
  // From here to the swap nothing lets other threads run.
  const at::Tensor& held = THPVariable_Unpack(cast);
  WeightCast entry{reference, Py_NewRef(cast), held, used, version_of(held), stream_of(tensor), made_of, std::move(storage)};
  if (stamp(tensor) == made_of) std::swap(of_this_mode()[weight], entry);
  release(entry);
  return true;
}

at::Tensor CastStore::find_recent(const at::Tensor& activation) {
  for (const RecentCast& entry : recent) {
    if (entry.activation._unsafe_get_target() != activation.unsafeGetTensorImpl()) continue;
    if (entry.version != version_of(activation) || entry.stream != stream_of(activation)) continue;
    at::Tensor cast(entry.cast.lock());
    if (cast.defined() && version_of(cast) == entry.cast_version) return cast;
  }
  return {};
}

void CastStore::keep_recent(const at::Tensor& activation, const at::Tensor& cast, uint32_t version) {
  RecentCast& entry = recent[next_recent];
  next_recent = (next_recent + 1) % recent.size();
  entry.activation = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(activation.getIntrusivePtr());
  entry.cast = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(cast.getIntrusivePtr());
  entry.version = version;
  entry.cast_version = version_of(cast);
  entry.stream = stream_of(activation);
}

int is_bypassed(CastStore* store) {
  if (store->bypassed) return 1;
  if (store->capturing == nullptr || store->capturing == Py_None) return 0;
  PyObject* answer = PyObject_CallNoArgs(store->capturing);
  if (answer == nullptr) return -1;
  const int truth = PyObject_IsTrue(answer);
  Py_DECREF(answer);
  return truth;
}

namespace {

bool check_tensor(PyObject* object, const char* name) {
  if (THPVariable_Check(object)) return true;
  PyErr_Format(PyExc_TypeError, "%s is a %s; expected a Tensor", name, Py_TYPE(object)->tp_name);
  return false;
}

PyObject* store_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  if (PyTuple_GET_SIZE(args) != 0 || (kwargs != nullptr && PyDict_GET_SIZE(kwargs) != 0)) {
    PyErr_SetString(PyExc_TypeError, "CastStore takes no arguments");
    return nullptr;
  }
  auto* self = reinterpret_cast<CastStore*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->capturing = Py_NewRef(Py_None);
  for_each_map(self, [](WeightCasts& casts) { new (&casts) WeightCasts(); });
  new (&self->last_used) std::vector<PyObject*>();
  new (&self->recent) std::array<RecentCast, 4>();
  return reinterpret_cast<PyObject*>(self);
}

CastStore* store_of(PyObject* self) { return reinterpret_cast<CastStore*>(self); }

int store_traverse(PyObject* object, visitproc visit, void* arg) {
  CastStore* self = store_of(object);
  Py_VISIT(self->capturing);
  Py_VISIT(self->on_death);
  for (PyObject* reference : self->last_used) Py_VISIT(reference);
  for (WeightCasts* casts : {&self->with_grad, &self->without_grad, &self->in_inference}) {
    for (auto& item : *casts) {
      Py_VISIT(item.second.weight);
      Py_VISIT(item.second.cast);
    }
  }
  return 0;
}

int store_clear(PyObject* self) {
  for_each_map(store_of(self), release_all);
  forget_last_used(store_of(self));
  Py_CLEAR(store_of(self)->on_death);
  Py_CLEAR(store_of(self)->capturing);
  return 0;
}

void store_dealloc(PyObject* object) {
  PyObject_GC_UnTrack(object);
  CastStore* self = store_of(object);
  store_clear(object);
  for_each_map(self, [](WeightCasts& casts) { casts.~WeightCasts(); });
  self->last_used.~vector();
  self->recent.~array();
  Py_TYPE(object)->tp_free(object);
}

PyObject* store_find(PyObject* self, PyObject* weight) {
  HANDLE_TH_ERRORS
  if (!check_tensor(weight, "weight")) return nullptr;
  PyObject* cast = store_of(self)->find(weight);
  return Py_NewRef(cast != nullptr ? cast : Py_None);
  END_HANDLE_TH_ERRORS
}

// For Python a stamp is a tuple.
PyObject* store_stamp(PyObject* self, PyObject* weight) {
  HANDLE_TH_ERRORS
  if (!check_tensor(weight, "weight")) return nullptr;
  const Stamp now = store_of(self)->stamp(THPVariable_Unpack(weight));
  return Py_BuildValue(
      "(KIKi)", static_cast<unsigned long long>(now.generation), now.version,
      static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(now.data)), static_cast<int>(now.requires_grad));
  END_HANDLE_TH_ERRORS
}

PyObject* store_keep(PyObject* self, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *weight, *cast;
  unsigned long long generation, data;
  unsigned int version;
  int requires_grad;
  if (!PyArg_ParseTuple(args, "OO(KIKi):keep", &weight, &cast, &generation, &version, &data, &requires_grad)) return nullptr;
  if (!check_tensor(weight, "weight") || !check_tensor(cast, "cast")) return nullptr;
  const Stamp made_of{generation, version, reinterpret_cast<const void*>(static_cast<uintptr_t>(data)), requires_grad != 0};
  if (!store_of(self)->keep(weight, cast, made_of, /*used=*/true)) return nullptr;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

void forget_recent(CastStore* store) {
  for (RecentCast& entry : store->recent) entry = RecentCast();
}

PyObject* store_forget(PyObject* self, PyObject* tensor) {
  ++store_of(self)->generation;
  forget_recent(store_of(self));
  for_each_map(store_of(self), [&](WeightCasts& casts) { take_out(casts, casts.find(tensor)); });
  Py_RETURN_NONE;
}

PyObject* store_drop(PyObject* object, PyObject* args, PyObject* kwargs) {
  static const char* keywords[] = {"before_backward", nullptr};
  int before_backward = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$p:drop", const_cast<char**>(keywords), &before_backward)) return nullptr;
  CastStore* self = store_of(object);
  // Activation checkpointing casts in the backward pass what one segment uses; that is no forward pass to go by.
  if (!self->in_backward && !self->with_grad.empty()) {
    forget_last_used(self);
    for (const auto& item : self->with_grad) {
      if (item.second.used) self->last_used.push_back(Py_NewRef(item.second.weight));
    }
  }
  self->in_backward = static_cast<char>(before_backward);
  ++self->generation;
  for_each_map(self, release_all);
  forget_recent(self);
  Py_RETURN_NONE;
}

PyObject* store_drop_without_grad(PyObject* self, PyObject*) {
  ++store_of(self)->generation;
  release_all(store_of(self)->without_grad);
  release_all(store_of(self)->in_inference);
  Py_RETURN_NONE;
}

PyObject* store_pairs(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  // First hold them all: making Python objects may collect garbage, and that may discard entries.
  std::vector<std::pair<THPObjectPtr, THPObjectPtr>> held;
  for_each_map(store_of(self), [&](WeightCasts& casts) {
    for (auto& item : casts) {
      THPObjectPtr weight = referent(item.second.weight);
      if (weight) held.emplace_back(std::move(weight), Py_NewRef(item.second.cast));
    }
  });
  THPObjectPtr pairs(PyList_New(0));
  if (!pairs) return nullptr;
  for (auto& [weight, cast] : held) {
    THPObjectPtr pair(PyTuple_Pack(2, weight.get(), cast.get()));
    if (!pair || PyList_Append(pairs.get(), pair.get()) < 0) return nullptr;
  }
  return pairs.release();
  END_HANDLE_TH_ERRORS
}

PyObject* store_find_recent(PyObject* self, PyObject* activation) {
  HANDLE_TH_ERRORS
  if (!check_tensor(activation, "activation")) return nullptr;
  at::Tensor cast = store_of(self)->find_recent(THPVariable_Unpack(activation));
  if (!cast.defined()) Py_RETURN_NONE;
  return THPVariable_Wrap(std::move(cast));
  END_HANDLE_TH_ERRORS
}

PyObject* store_keep_recent(PyObject* self, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *activation, *cast;
  unsigned int version;
  if (!PyArg_ParseTuple(args, "OOI:keep_recent", &activation, &cast, &version)) return nullptr;
  if (!check_tensor(activation, "activation") || !check_tensor(cast, "cast")) return nullptr;
  store_of(self)->keep_recent(THPVariable_Unpack(activation), THPVariable_Unpack(cast), version);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

Py_ssize_t store_length(PyObject* self) {
  size_t length = 0;
  for_each_map(store_of(self), [&](WeightCasts& casts) { length += casts.size(); });
  return static_cast<Py_ssize_t>(length);
}

PyMethodDef store_methods[] = {
    {"find", store_find, METH_O, nullptr},
    {"stamp", store_stamp, METH_O, nullptr},
    {"keep", store_keep, METH_VARARGS, nullptr},
    {"forget", store_forget, METH_O, nullptr},
    {"drop", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&store_drop)), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"drop_without_grad", store_drop_without_grad, METH_NOARGS, nullptr},
    {"pairs", store_pairs, METH_NOARGS, nullptr},
    {"find_recent", store_find_recent, METH_O, nullptr},
    {"keep_recent", store_keep_recent, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyMemberDef store_members[] = {
    {"bypassed", T_BOOL, offsetof(CastStore, bypassed), 0, nullptr},
    {"keep_without_grad", T_BOOL, offsetof(CastStore, keep_without_grad), 0, nullptr},
    {"casts_made", T_PYSSIZET, offsetof(CastStore, casts_made), 0, nullptr},
    {"capturing", T_OBJECT, offsetof(CastStore, capturing), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PySequenceMethods store_as_sequence = {store_length};

PyTypeObject make_store_type() {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "ampkit._casting.CastStore";
  type.tp_basicsize = sizeof(CastStore);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
  type.tp_doc = "Casts of weights and of recent activations; see ampkit.casting.store.CastStore.";
  type.tp_new = store_new;
  type.tp_dealloc = store_dealloc;
  type.tp_traverse = store_traverse;
  type.tp_clear = store_clear;
  type.tp_methods = store_methods;
  type.tp_members = store_members;
  type.tp_as_sequence = &store_as_sequence;
  return type;
}

}  // namespace

PyTypeObject CastStoreType = make_store_type();

}  // namespace ampkit
