// The replacement of a function of torch under O1 when this library is loaded: a C function, or a method descriptor of
// torch.Tensor, that casts the tensors among its arguments and calls the original.
//
// It handles common arguments (tensors and parameters of exactly these types, numbers, sizes) and passes all others
// to the wrapper in Python (ampkit/casting/wrappers.py), which is the specification of both. A Call lives as long as
// the process, like the functions of torch. An engine binds and unbinds it; unbound it only calls the original.
#pragma once

#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <new>

#include "cast_store.h"
#include "switch.h"

namespace ampkit {

// ampkit.policy.cast_rules.CastKind, by what the fast path does: Call.bind takes the names.
enum class Kind { Lower, Fp32, Promote, MatchFirst, Reject, Banned, Native };

// The state that an engine gives a Call. Counted, since the engine may be closed during a call.
struct Binding {
  // In Python's arenas: a thousand of them on the C heap, between the tensors, make torch's own allocations slower.
  static void* operator new(size_t size) {
    if (void* memory = PyMem_Malloc(size)) return memory;
    throw std::bad_alloc();
  }
  static void operator delete(void* memory) { PyMem_Free(memory); }

  long references = 1;
  Kind kind;
  bool follows_regions;  // the target is the lower precision, which a region of torch.autocast may choose
  bool is_builtin;       // the original is written in C++
  at::ScalarType target;
  std::shared_ptr<const Switch> control;
  pybind11::object slow;             // the wrapper in Python
  std::shared_ptr<CastStore> store;  // null but for Kind::Lower
  pybind11::object cast_weight;      // how Python casts a weight that is not in the store
};

struct Call {
  PyObject_HEAD
  PyMethodDef definition;
  PyObject* name;      // str
  PyObject* module;    // str: where pickle finds the function
  PyObject* doc;       // str or None
  PyObject* original;  // the function that is called in the end
  Binding* binding;    // null while no engine has it
};

}  // namespace ampkit
