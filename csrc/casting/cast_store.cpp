#include "cast_store.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <pybind11/stl.h>

#include <algorithm>
#include <utility>

#include "narrow_gradients.h"
#include "shared_cast.h"
#include "weight_casts.h"

namespace py = pybind11;

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
void take_out(CastStore& store, Ends&& ends) {
  std::vector<WeightCast> doomed;
  for (auto place = store.of_weights.begin(); place != store.of_weights.end();) {
    if (!ends(*place)) {
      ++place;
      continue;
    }
    doomed.push_back(std::move(place->second));
    place = store.of_weights.erase(place);
  }
}

// Remembers the weights that a call used, for the next call that begins with the same one.
void note_companions(CastStore& store, Lifetime call) {
  std::vector<WeightCast*> used;
  for (auto& [key, entry] : store.of_weights) {
    if (is_recorded(key) && entry.call == call && entry.uses > 0) used.push_back(&entry);
  }
  std::sort(used.begin(), used.end(), [](auto* a, auto* b) { return a->order < b->order; });
  THPObjectPtr first = used.empty() ? THPObjectPtr() : referent(used.front()->weight.get());
  if (!first) return;
  if (store.companions.size() >= kMaxCompanions) store.companions.clear();
  std::vector<THPObjectPtr>& companions = store.companions[first.get()];
  companions.clear();
  for (WeightCast* entry : used) companions.emplace_back(Py_NewRef(entry->weight.get()));
}

}  // namespace

Lifetime CastStore::lifetime_of(PyObject* weight) const {
  if (this_thread.kept != kNotKept && this_thread.kept_weights->count(weight) > 0) return this_thread.kept;
  const bool lives_on = keeps_all || (this_thread.call != kNotKept && to_step.count(weight) > 0);
  return lives_on && c10::GradMode::is_enabled() ? kToStep : this_thread.call;
}

WeightCast* CastStore::usable(PyObject* weight) {
  auto found = of_weights.find(key_of(weight));
  if (found == of_weights.end()) return nullptr;
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
  WeightCast entry;
  entry.weight = PyWeakref_NewRef(weight, on_death.ptr());
  if (!entry.weight) return false;
  // From here to the swap nothing lets other threads run.
  const at::Tensor& tensor = THPVariable_Unpack(weight);
  entry.cast = Py_NewRef(cast);
  entry.held = THPVariable_Unpack(cast);
  entry.lifetime = lifetime;
  entry.call = this_thread.call;
  entry.has_node = entry.held.requires_grad();
  entry.uses = used ? 1 : 0;
  entry.order = ++kept;
  entry.cast_version = version_of(entry.held);
  entry.stream = stream_of(tensor);
  entry.stamp = made_of;
  entry.storage = tensor.storage().getWeakStorageImpl();
  if (stamp(tensor) == made_of) std::swap(of_weights[key_of(weight)], entry);
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
  entry.activation = RecentCast::WeakTensor(activation.getIntrusivePtr());
  entry.cast = RecentCast::WeakTensor(cast.getIntrusivePtr());
  entry.version = version;
  entry.cast_version = version_of(cast);
  entry.stream = stream_of(activation);
}

bool is_bypassed(const CastStore& store) {
  return store.bypassed || (!store.capturing.is_none() && store.capturing().cast<bool>());
}

namespace {

std::shared_ptr<CastStore> make_store() {
  auto store = std::make_shared<CastStore>();
  const auto discard = [weak = std::weak_ptr(store)](py::handle reference) {
    // The address may belong to another weight by now.
    if (const auto found = weak.lock()) {
      take_out(*found, [&](const auto& item) { return item.second.weight.get() == reference.ptr(); });
    }
  };
  // By its module patching.py knows the reference as ampkit's.
  store->on_death = py::cpp_function(discard, py::scope(py::module_::import("ampkit._casting")));
  return store;
}

Weights addresses_in(const py::tuple& weights) {
  Weights addresses;
  for (py::handle weight : weights) addresses.insert(weight.ptr());
  return addresses;
}

py::object store_cast(CastStore& store, const at::Tensor& tensor, const py::object& convert) {
  const auto weight = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  if (PyObject* found = store.find(weight.ptr())) return py::reinterpret_borrow<py::object>(found);
  if (PyObject* use = store.another_use(weight.ptr())) return py::reinterpret_steal<py::object>(use);
  if (PyErr_Occurred()) throw py::error_already_set();
  const bool is_plain = is_plain_weight(tensor);
  const c10::Storage storage = is_plain ? tensor.storage() : c10::Storage();
  const Stamp made_of = is_plain ? store.stamp(tensor) : Stamp();
  const bool hands_on =
      is_plain && c10::GradMode::is_enabled() && tensor.requires_grad() && takes_narrow_gradients(tensor);
  py::object cast;
  {
    const c10::AutoGradMode mode(c10::GradMode::is_enabled() && !hands_on);
    cast = convert(weight);
  }
  if (cast.is(weight)) return cast;
  if (hands_on && THPVariable_CheckExact(cast.ptr())) {
    py::gil_scoped_release without_gil;
    record_cast(tensor, THPVariable_Unpack(cast.ptr()), kAtOnce);
  }
  ++store.casts_made;
  const bool keeps = is_plain && means_the_same(cast.ptr());
  if (keeps && !store.keep(weight.ptr(), cast.ptr(), made_of, /*used=*/true)) throw py::error_already_set();
  return cast;
}

void store_forget(CastStore& store, const at::Tensor& tensor) {
  ++store.generation;
  store.recent.fill(RecentCast());
  const auto weight = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  const c10::StorageImpl* storage = storage_of(tensor);
  take_out(store, [&](const auto& item) {
    return weight_of(item.first) == weight.ptr() ||
        (storage != nullptr && item.second.storage._unsafe_get_target() == storage);
  });
}

void store_drop(CastStore& store) {
  ++store.generation;
  store.to_step.clear();
  const py::object held = std::move(store.held_to_step);
  take_out(store, [](const auto&) { return true; });
  store.recent.fill(RecentCast());
}

void store_drop_ended(CastStore& store) {
  take_out(store, [](const auto& item) { return item.second.lifetime == kEnded; });
}

// Ends a call: its casts that autograd recorded wait for `drop_ended`, others are dropped.
void store_end(CastStore& store, Lifetime lifetime) {
  note_companions(store, lifetime);
  for (auto& [key, entry] : store.of_weights) {
    if (entry.lifetime == lifetime && entry.has_node) entry.lifetime = kEnded;
  }
  take_out(store, [&](const auto& item) { return item.second.lifetime == lifetime; });
}

void store_keep_to_step(CastStore& store, const py::tuple& weights) {
  store.to_step = addresses_in(weights);
  for (auto& [key, entry] : store.of_weights) {
    if (entry.lifetime == kEnded && store.to_step.count(weight_of(key)) > 0) entry.lifetime = kToStep;
  }
  const py::object before = std::exchange(store.held_to_step, weights);
}

// Begins a call in this thread; false, and nothing else, if it is inside of another.
bool begin_call(Lifetime number) {
  if (this_thread.call != kNotKept) return false;
  this_thread.call = number;
  return true;
}

void end_call(const py::tuple& stores, Lifetime number) {
  this_thread.call = kNotKept;
  for (py::handle store : stores) store_end(store.cast<CastStore&>(), number);
}

Lifetime set_kept(Lifetime number, const py::tuple& weights) {
  delete std::exchange(this_thread.kept_weights, number == kNotKept ? nullptr : new Weights(addresses_in(weights)));
  return std::exchange(this_thread.kept, number);
}

std::vector<std::pair<py::object, py::object>> store_pairs(CastStore& store) {
  std::vector<std::pair<py::object, py::object>> pairs;
  for (auto& [key, entry] : store.of_weights) {
    THPObjectPtr weight = referent(entry.weight.get());
    if (!weight || entry.lifetime == kEnded) continue;
    pairs.emplace_back(
        py::reinterpret_steal<py::object>(weight.release()), py::reinterpret_borrow<py::object>(entry.cast.get()));
  }
  return pairs;
}

}  // namespace

// The class CastStore, of which ampkit.casting.state.CastCaches holds one for each dtype.
void add_cast_store(py::module_& module) {
  py::class_<CastStore, std::shared_ptr<CastStore>>(module, "CastStore")
      .def(py::init(&make_store))
      .def("cast", &store_cast)
      .def("forget", &store_forget)
      .def("drop", &store_drop)
      .def("drop_ended", &store_drop_ended)
      .def("end", &store_end)
      .def("keep_to_step", &store_keep_to_step)
      .def("pairs", &store_pairs)
      .def_static("begin_call", &begin_call)
      .def_static("end_call", &end_call)
      .def_static("set_kept", &set_kept)
      .def_readwrite("bypassed", &CastStore::bypassed)
      .def_readwrite("keeps_all", &CastStore::keeps_all)
      .def_readwrite("casts_made", &CastStore::casts_made)
      .def_readwrite("capturing", &CastStore::capturing);
}

}  // namespace ampkit
