#include "cast_store.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <structmember.h>
#include <torch/csrc/Exceptions.h>

#include <pybind11/pybind11.h>

#include <algorithm>
#include <new>
#include <utility>

#include "narrow_gradients.h"
#include "shared_cast.h"
#include "weight_casts.h"

namespace ampkit {

constinit thread_local ThisThread this_thread;

uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

namespace {

// So many uses of a weight in one call share a node, in which their gradients add up in the cast's precision. The sums of the
// nodes add up in float32.
constexpr int kUsesOfANode = 64;

constexpr size_t kMaxCompanions = 64;

// Casts made with and without grad mode, and in inference mode, are kept apart: the lowest bits of an address are free.
uintptr_t key_of(PyObject* weight, bool recording = c10::GradMode::is_enabled()) {
  return reinterpret_cast<uintptr_t>(weight) | (recording ? 0 : c10::InferenceMode::is_enabled() ? 1 : 2);
}

PyObject* weight_of(uintptr_t key) { return reinterpret_cast<PyObject*>(key & ~uintptr_t{3}); }
bool is_recorded(uintptr_t key) { return (key & 3) == 0; }

// The stream on which kernels for the tensor are queued now. Another stream would read a cast before it is written.
c10::StreamId stream_of(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return 0;
  return c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device()).id();
}

const void* data_of(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl()->data(); }

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return impl->has_storage() ? impl->unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

// Takes out the entries of weights for which `ends` holds. They are released afterwards, since releasing them may run Python
// code that uses the store, and frees tensors, which lets other threads run.
template <typename Ends>
void take_out(Casts& casts, Ends&& ends) {
  std::vector<WeightCast> doomed;
  for (auto place = casts.of_weights.begin(); place != casts.of_weights.end();) {
    if (!ends(*place)) {
      ++place;
      continue;
    }
    doomed.push_back(std::move(place->second));
    place = casts.of_weights.erase(place);
  }
}

void forget_recent(Casts& casts) { casts.recent.fill(RecentCast()); }

// The callback of the weak references to weights: the address may belong to another weight by now.
PyObject* discard(PyObject* store, PyObject* reference) {
  take_out(reinterpret_cast<CastStore*>(store)->casts, [&](const auto& item) { return item.second.weight.get() == reference; });
  Py_RETURN_NONE;
}

PyMethodDef discard_definition = {"discard", discard, METH_O, nullptr};

// Remembers the weights that a call used, for the next call that begins with the same one.
void note_companions(Casts& casts, Lifetime call) {
  std::vector<WeightCast*> used;
  for (auto& [key, entry] : casts.of_weights) {
    if (is_recorded(key) && entry.call == call && entry.uses > 0) used.push_back(&entry);
  }
  std::sort(used.begin(), used.end(), [](auto* a, auto* b) { return a->order < b->order; });
  THPObjectPtr first = used.empty() ? THPObjectPtr() : referent(used.front()->weight.get());
  if (!first) return;
  if (casts.companions.size() >= kMaxCompanions) casts.companions.clear();
  std::vector<THPObjectPtr>& companions = casts.companions[first.get()];
  companions.clear();
  for (WeightCast* entry : used) companions.emplace_back(Py_NewRef(entry->weight.get()));
}

}  // namespace

Lifetime CastStore::lifetime_of(PyObject* weight) const {
  if (this_thread.kept != kNotKept && this_thread.kept_weights->count(weight) > 0) return this_thread.kept;
  const bool to_step = keeps_all || (this_thread.call != kNotKept && casts.to_step.count(weight) > 0);
  return to_step && c10::GradMode::is_enabled() ? kToStep : this_thread.call;
}

WeightCast* CastStore::usable(PyObject* weight) {
  auto found = casts.of_weights.find(key_of(weight));
  if (found == casts.of_weights.end()) return nullptr;
  WeightCast& entry = found->second;
  const ThisThread& here = this_thread;
  if (entry.lifetime != here.call && entry.lifetime != here.kept && entry.lifetime != kToStep) return nullptr;
  const at::Tensor& tensor = THPVariable_Unpack(weight);
  const bool holds = referent(entry.weight.get()).get() == weight && version_of(tensor) == entry.stamp.version &&
      data_of(tensor) == entry.stamp.data && storage_of(tensor) == entry.storage._unsafe_get_target() &&
      tensor.requires_grad() == entry.stamp.requires_grad && stream_of(tensor) == entry.stream &&
      version_of(entry.held) == entry.cast_version;
  return holds ? &entry : nullptr;
}

PyObject* CastStore::find(PyObject* weight) {
  WeightCast* entry = usable(weight);
  if (entry == nullptr) return nullptr;
  const bool shares_node = ++entry->uses <= kUsesOfANode && entry->call == this_thread.call;
  return shares_node || !entry->has_node ? entry->cast.get() : nullptr;
}

PyObject* CastStore::another_use(PyObject* weight) {
  WeightCast* entry = usable(weight);
  if (entry == nullptr) return nullptr;
  const at::Tensor cast = entry->held;
  at::Tensor made = another_use_of(THPVariable_Unpack(weight), cast, kAtOnce);
  PyObject* use = THPVariable_Wrap(made);
  entry = usable(weight);  // other threads ran meanwhile
  if (use == nullptr || entry == nullptr || !entry->held.is_same(cast)) return use;
  THPObjectPtr before(Py_NewRef(use));
  std::swap(before, entry->cast);
  std::swap(made, entry->held);
  entry->call = this_thread.call;
  entry->uses = 1;
  return use;
}

Stamp CastStore::stamp(const at::Tensor& weight) const {
  return {generation, version_of(weight), data_of(weight), weight.requires_grad()};
}

bool CastStore::keep(PyObject* weight, PyObject* cast, const Stamp& made_of, bool used) {
  const Lifetime lifetime = lifetime_of(weight);
  if (lifetime == kNotKept) return true;
  if (on_death == nullptr) {
    PyObject* callback = PyCFunction_New(&discard_definition, reinterpret_cast<PyObject*>(this));
    if (callback == nullptr) return false;
    Py_XSETREF(on_death, callback);  // making it may have collected garbage, which may have called this function
  }
  WeightCast entry;
  entry.weight = PyWeakref_NewRef(weight, on_death);
  if (!entry.weight) return false;
  // From here to the swap nothing lets other threads run.
  const at::Tensor& tensor = THPVariable_Unpack(weight);
  entry.cast = Py_NewRef(cast);
  entry.held = THPVariable_Unpack(cast);
  entry.lifetime = lifetime;
  entry.call = this_thread.call;
  entry.has_node = entry.held.requires_grad();
  entry.uses = used ? 1 : 0;
  entry.order = ++casts.kept;
  entry.cast_version = version_of(entry.held);
  entry.stream = stream_of(tensor);
  entry.stamp = made_of;
  entry.storage = tensor.storage().getWeakStorageImpl();
  if (stamp(tensor) == made_of) std::swap(casts.of_weights[key_of(weight)], entry);
  return true;
}

at::Tensor CastStore::find_recent(const at::Tensor& activation) {
  for (const RecentCast& entry : casts.recent) {
    if (entry.activation._unsafe_get_target() != activation.unsafeGetTensorImpl()) continue;
    if (entry.version != version_of(activation) || entry.stream != stream_of(activation)) continue;
    at::Tensor cast(entry.cast.lock());
    if (cast.defined() && version_of(cast) == entry.cast_version) return cast;
  }
  return {};
}

void CastStore::keep_recent(const at::Tensor& activation, const at::Tensor& cast, uint32_t version) {
  RecentCast& entry = casts.recent[casts.next_recent];
  casts.next_recent = (casts.next_recent + 1) % casts.recent.size();
  entry.activation = RecentCast::WeakTensor(activation.getIntrusivePtr());
  entry.cast = RecentCast::WeakTensor(cast.getIntrusivePtr());
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

CastStore* store_of(PyObject* self) { return reinterpret_cast<CastStore*>(self); }

PyObject* store_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* self = reinterpret_cast<CastStore*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->capturing = Py_NewRef(Py_None);
  new (&self->casts) Casts();
  return reinterpret_cast<PyObject*>(self);
}

// Casts refer to weights through autograd, which Python's garbage collector does not traverse: `drop` ends them.
int store_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(store_of(self)->capturing);
  Py_VISIT(store_of(self)->on_death);
  for (auto& [first, references] : store_of(self)->casts.companions) {
    for (THPObjectPtr& reference : references) Py_VISIT(reference.get());
  }
  return 0;
}

int store_clear(PyObject* self) {
  take_out(store_of(self)->casts, [](const auto&) { return true; });
  store_of(self)->casts.companions.clear();
  Py_CLEAR(store_of(self)->on_death);
  Py_CLEAR(store_of(self)->capturing);
  return 0;
}

void store_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  store_clear(self);
  store_of(self)->casts.~Casts();
  Py_TYPE(self)->tp_free(self);
}

bool check_tensor(PyObject* object, const char* name) {
  if (THPVariable_Check(object)) return true;
  PyErr_Format(PyExc_TypeError, "%s is a %s; expected a Tensor", name, Py_TYPE(object)->tp_name);
  return false;
}

Weights addresses_in(PyObject* tuple) {
  Weights weights;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) weights.insert(PyTuple_GET_ITEM(tuple, i));
  return weights;
}

PyObject* store_cast(PyObject* object, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *weight, *convert;
  if (!PyArg_ParseTuple(args, "OO:cast", &weight, &convert) || !check_tensor(weight, "weight")) return nullptr;
  CastStore* self = store_of(object);
  if (PyObject* found = self->find(weight)) return Py_NewRef(found);
  if (PyObject* use = self->another_use(weight); use != nullptr || PyErr_Occurred()) return use;
  const at::Tensor tensor = THPVariable_Unpack(weight);
  const bool is_plain = is_plain_weight(tensor);
  const c10::Storage storage = is_plain ? tensor.storage() : c10::Storage();
  const Stamp made_of = is_plain ? self->stamp(tensor) : Stamp();
  const bool hands_on = is_plain && c10::GradMode::is_enabled() && tensor.requires_grad() && takes_narrow_gradients(tensor);
  THPObjectPtr cast;
  {
    const c10::AutoGradMode mode(c10::GradMode::is_enabled() && !hands_on);
    cast = PyObject_CallOneArg(convert, weight);
  }
  if (!cast || cast.get() == weight) return cast.release();
  if (hands_on && THPVariable_CheckExact(cast.get())) {
    pybind11::gil_scoped_release without_gil;
    record_cast(tensor, THPVariable_Unpack(cast.get()), kAtOnce);
  }
  ++self->casts_made;
  const bool keeps = is_plain && means_the_same(cast.get());
  return keeps && !self->keep(weight, cast.get(), made_of, /*used=*/true) ? nullptr : cast.release();
  END_HANDLE_TH_ERRORS
}

PyObject* store_forget(PyObject* self, PyObject* tensor) {
  HANDLE_TH_ERRORS
  if (!check_tensor(tensor, "tensor")) return nullptr;
  ++store_of(self)->generation;
  forget_recent(store_of(self)->casts);
  const c10::StorageImpl* storage = storage_of(THPVariable_Unpack(tensor));
  take_out(store_of(self)->casts, [&](const auto& item) {
    return weight_of(item.first) == tensor || (storage != nullptr && item.second.storage._unsafe_get_target() == storage);
  });
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* store_drop(PyObject* self, PyObject*) {
  ++store_of(self)->generation;
  store_of(self)->casts.to_step.clear();
  THPObjectPtr held = std::move(store_of(self)->casts.held_to_step);
  take_out(store_of(self)->casts, [](const auto&) { return true; });
  forget_recent(store_of(self)->casts);
  Py_RETURN_NONE;
}

PyObject* store_drop_ended(PyObject* self, PyObject*) {
  take_out(store_of(self)->casts, [](const auto& item) { return item.second.lifetime == kEnded; });
  Py_RETURN_NONE;
}

// Ends a call: its casts that autograd recorded wait for `drop_ended`, others are dropped.
PyObject* store_end(PyObject* self, PyObject* number) {
  const Lifetime lifetime = PyLong_AsUnsignedLongLong(number);
  Casts& casts = store_of(self)->casts;
  note_companions(casts, lifetime);
  for (auto& [key, entry] : casts.of_weights) {
    if (entry.lifetime == lifetime && entry.has_node) entry.lifetime = kEnded;
  }
  take_out(casts, [&](const auto& item) { return item.second.lifetime == lifetime; });
  Py_RETURN_NONE;
}

PyObject* store_keep_to_step(PyObject* self, PyObject* args) {
  PyObject* weights;
  if (!PyArg_ParseTuple(args, "O!:keep_to_step", &PyTuple_Type, &weights)) return nullptr;
  Casts& casts = store_of(self)->casts;
  casts.to_step = addresses_in(weights);
  for (auto& [key, entry] : casts.of_weights) {
    if (entry.lifetime == kEnded && casts.to_step.count(weight_of(key)) > 0) entry.lifetime = kToStep;
  }
  THPObjectPtr before(Py_NewRef(weights));
  std::swap(before, casts.held_to_step);
  Py_RETURN_NONE;
}

PyObject* store_set_call(PyObject*, PyObject* number) {
  return PyLong_FromUnsignedLongLong(std::exchange(this_thread.call, PyLong_AsUnsignedLongLong(number)));
}

PyObject* store_set_kept(PyObject*, PyObject* args) {
  PyObject* weights;
  unsigned long long number;
  if (!PyArg_ParseTuple(args, "KO!:set_kept", &number, &PyTuple_Type, &weights)) return nullptr;
  delete std::exchange(this_thread.kept_weights, number == kNotKept ? nullptr : new Weights(addresses_in(weights)));
  return PyLong_FromUnsignedLongLong(std::exchange(this_thread.kept, number));
}

PyObject* store_pairs(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  // First hold them all: making Python objects may collect garbage, which may discard entries.
  std::vector<std::pair<THPObjectPtr, THPObjectPtr>> held;
  for (auto& [key, entry] : store_of(self)->casts.of_weights) {
    THPObjectPtr weight = referent(entry.weight.get());
    if (weight && entry.lifetime != kEnded) held.emplace_back(std::move(weight), Py_NewRef(entry.cast.get()));
  }
  THPObjectPtr pairs(PyList_New(0));
  if (!pairs) return nullptr;
  for (auto& [weight, cast] : held) {
    THPObjectPtr pair(PyTuple_Pack(2, weight.get(), cast.get()));
    if (!pair || PyList_Append(pairs.get(), pair.get()) < 0) return nullptr;
  }
  return pairs.release();
  END_HANDLE_TH_ERRORS
}

PyMethodDef store_methods[] = {
    {"cast", store_cast, METH_VARARGS, nullptr},
    {"forget", store_forget, METH_O, nullptr},
    {"drop", store_drop, METH_NOARGS, nullptr},
    {"drop_ended", store_drop_ended, METH_NOARGS, nullptr},
    {"end", store_end, METH_O, nullptr},
    {"keep_to_step", store_keep_to_step, METH_VARARGS, nullptr},
    {"set_call", store_set_call, METH_O | METH_STATIC, nullptr},
    {"set_kept", store_set_kept, METH_VARARGS | METH_STATIC, nullptr},
    {"pairs", store_pairs, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyMemberDef store_members[] = {
    {"bypassed", T_BOOL, offsetof(CastStore, bypassed), 0, nullptr},
    {"keeps_all", T_BOOL, offsetof(CastStore, keeps_all), 0, nullptr},
    {"casts_made", T_PYSSIZET, offsetof(CastStore, casts_made), 0, nullptr},
    {"capturing", T_OBJECT, offsetof(CastStore, capturing), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyTypeObject make_store_type() {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "ampkit._casting.CastStore";
  type.tp_basicsize = sizeof(CastStore);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
  type.tp_doc = "Casts of weights and of recent activations; see ampkit.casting.state.CastCaches.";
  type.tp_new = store_new;
  type.tp_dealloc = store_dealloc;
  type.tp_traverse = store_traverse;
  type.tp_clear = store_clear;
  type.tp_methods = store_methods;
  type.tp_members = store_members;
  return type;
}

}  // namespace

PyTypeObject CastStoreType = make_store_type();

}  // namespace ampkit
