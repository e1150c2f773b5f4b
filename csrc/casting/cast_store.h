// Casts of weights and of recent activations to one dtype: the C++ twin of ampkit.casting.store.CastStore, which says
// what the methods mean. Call looks things up in it, and fills it, without going through Python.
#pragma once

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <array>
#include <unordered_map>
#include <vector>

namespace ampkit {

// What a cast is made of, taken before: other threads run meanwhile, and a cast of a value that is gone must not be kept. The
// function that takes a stamp holds the weight's storage until it compares it, so that no other storage comes to lie at its address.
struct Stamp {
  uint64_t generation;  // of the store
  uint32_t version;
  const void* data;
  bool requires_grad;

  bool operator==(const Stamp&) const = default;
};

// What a weak reference refers to, held while it is used; nothing where that is gone.
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

struct WeightCast {
  PyObject* weight = nullptr;  // a weak reference, whose callback discards the entry
  PyObject* cast = nullptr;
  // A second reference to the cast, in C++: a tensor that only its Python object holds needs the GIL wherever a function in C++
  // keeps it (autograd saves it for the backward pass) and lets it go.
  at::Tensor held;
  bool used = false;  // not only cast ahead
  uint32_t cast_version = 0;
  c10::StreamId stream = 0;
  Stamp stamp = {};
  c10::Storage storage;  // kept alive, so that no other storage can come to lie at the stamp's address
};

using WeightCasts = std::unordered_map<PyObject*, WeightCast>;

// Weak on both sides: the graph or the call that uses the cast keeps it alive, the store never does.
struct RecentCast {
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> activation;
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> cast;
  uint32_t version = 0;
  uint32_t cast_version = 0;
  c10::StreamId stream = 0;

  RecentCast();
};

struct CastStore {
  PyObject_HEAD
  char bypassed;           // look nothing up, keep nothing
  char keep_without_grad;  // keep casts of evaluation too
  char in_backward;        // from a drop before a backward pass to the next drop
  Py_ssize_t casts_made;
  uint64_t generation;  // goes up when anything is dropped or forgotten
  PyObject* capturing;  // None, or what tells whether the current stream is being captured into a CUDA graph
  PyObject* on_death;   // the callback of the weak references
  WeightCasts with_grad, without_grad, in_inference;
  std::vector<PyObject*> last_used;  // weak references to the weights that the last forward pass used
  std::array<RecentCast, 4> recent;
  size_t next_recent;

  // The casts of weights that are of use in the grad mode of now.
  WeightCasts& of_this_mode();
  // A borrowed reference, or null. Does not ask whether the store is bypassed.
  PyObject* find(PyObject* weight);
  // What the weight is now.
  Stamp stamp(const at::Tensor& weight) const;
  // Keeps a cast of what `stamp` says, if that is what the weight still is. Returns false with a Python exception.
  bool keep(PyObject* weight, PyObject* cast, const Stamp& made_of, bool used);
  at::Tensor find_recent(const at::Tensor& activation);
  // `version` is the activation's before it was cast.
  void keep_recent(const at::Tensor& activation, const at::Tensor& cast, uint32_t version);
};

// How often torch counted a write to the tensor; 0 where it does not count.
uint32_t version_of(const at::Tensor& tensor);

// Whether the store must not be used now: 1, 0, or -1 with a Python exception.
int is_bypassed(CastStore* store);

extern PyTypeObject CastStoreType;

}  // namespace ampkit
