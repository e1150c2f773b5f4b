// Casts of weights and of recent activations to one dtype; ampkit.casting.state.CastCaches holds a store for each dtype. Call reads
// and fills it without going through Python. `lifetime_of` alone decides how long a cast lives: to the end
// of the outermost call of an initialized model in this thread, to the end of keep_casts, or to the optimizer step. Elsewhere
// nothing is kept. Casts made with grad mode, without it, and in inference mode are kept apart: a cast that autograd did not record
// is useless for training, and one that it recorded would keep a graph alive through an evaluation.
#pragma once

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace ampkit {

// The state of a weight before it is cast: other threads run meanwhile, and a cast of an old value must not be kept. The function
// that takes a stamp holds the weight's storage until it compares the stamp, so that no other storage is allocated at its address.
struct Stamp {
  uint64_t generation;  // of the store
  uint32_t version;
  const void* data;
  bool requires_grad;

  bool operator==(const Stamp&) const = default;
};

// The object of a weak reference, held while it is used; empty if it is gone.
inline THPObjectPtr referent(PyObject* reference) {
#if PY_VERSION_HEX >= 0x030d0000
  PyObject* object = nullptr;
  PyWeakref_GetRef(reference, &object);
  return THPObjectPtr(object);
#else
  PyObject* object = PyWeakref_GET_OBJECT(reference);
  return THPObjectPtr(object == Py_None ? nullptr : Py_NewRef(object));
#endif
}

// The number of the call, or of the keep_casts, with which a cast ends.
using Lifetime = uint64_t;
constexpr Lifetime kNotKept = 0, kEnded = UINT64_MAX - 1, kToStep = UINT64_MAX;

// Weights by their addresses, which are unique as long as a reference to each weight is held elsewhere.
using Weights = std::unordered_set<PyObject*>;

// The state of this thread: the outermost call of an initialized model, and the innermost keep_casts with its weights.
struct ThisThread {
  Lifetime call = kNotKept;
  Lifetime kept = kNotKept;
  Weights* kept_weights = nullptr;
};
extern constinit thread_local ThisThread this_thread;

struct WeightCast {
  THPObjectPtr weight;  // a weak reference, whose callback discards the entry
  THPObjectPtr cast;
  // A second reference to the cast, in C++: a tensor that only its Python object holds needs the GIL whenever a function in C++
  // keeps it (autograd saves it for the backward pass) and releases it.
  at::Tensor held;
  Lifetime lifetime = kNotKept;
  Lifetime call = kNotKept;  // the call that has made the uses of this node
  bool has_node = false;
  int uses = 0;  // 0: cast ahead
  Py_ssize_t order = 0;
  uint32_t cast_version = 0;
  c10::StreamId stream = 0;
  Stamp stamp = {};
  // As long as this reference exists, no other storage is allocated at its address.
  c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};
};

// Weak on both sides: the graph or the call that uses the cast keeps it alive, the store never does.
struct RecentCast {
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  WeakTensor activation{at::Tensor().getIntrusivePtr()};
  WeakTensor cast{at::Tensor().getIntrusivePtr()};
  uint32_t version = 0;
  uint32_t cast_version = 0;
  c10::StreamId stream = 0;
};

struct CastStore {
  bool bypassed = false;   // look nothing up, keep nothing
  bool keeps_all = false;  // keep whatever autograd records to the next drop
  Py_ssize_t casts_made = 0;
  uint64_t generation = 0;  // goes up when anything is dropped or forgotten
  // None, or a function: whether the current stream is being captured into a CUDA graph.
  pybind11::object capturing = pybind11::none();
  pybind11::object on_death;                             // the callback of the weak references
  std::unordered_map<uintptr_t, WeightCast> of_weights;  // by address and mode
  std::array<RecentCast, 4> recent;
  size_t next_recent = 0;
  Py_ssize_t kept = 0;            // so far
  Weights to_step;                // the weights whose casts live to the optimizer step
  pybind11::object held_to_step;  // a tuple of them
  // The weights that a call used, by the first of them: weak references, the first weight's in front.
  std::unordered_map<PyObject*, std::vector<THPObjectPtr>> companions;

  // The lifetime of a cast of the weight that this thread makes now.
  Lifetime lifetime_of(PyObject* weight) const;
  // The entry of the weight that a call in this thread may use, or null. Does not ask whether the store is bypassed.
  WeightCast* usable(PyObject* weight);
  // The kept cast, borrowed; null if there is none, or if its node has had all its uses.
  PyObject* find(PyObject* weight);
  // A new reference to the kept cast with a node of its own; null without an exception if none is kept.
  PyObject* another_use(PyObject* weight);
  // The present state of the weight.
  Stamp stamp(const at::Tensor& weight) const;
  // Keeps a cast for the lifetime that `lifetime_of` returns, if the weight's stamp is still `made_of`. Returns false with a
  // Python exception.
  bool keep(PyObject* weight, PyObject* cast, const Stamp& made_of, bool used);
  at::Tensor find_recent(const at::Tensor& activation);
  // `version` is the activation's before it was cast.
  void keep_recent(const at::Tensor& activation, const at::Tensor& cast, uint32_t version);
};

// How often torch counted a write to the tensor; 0 where it does not count.
uint32_t version_of(const at::Tensor& tensor);

// Whether the store must not be used now.
bool is_bypassed(const CastStore& store);

}  // namespace ampkit
