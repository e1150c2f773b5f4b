// What stands in torch's place under O1 when this library is loaded: a C function, or a method descriptor of
// torch.Tensor, that casts the tensors among its arguments and calls the original.
//
// It handles what is common (tensors and parameters of exactly these types, numbers, sizes) and hands everything else
// to the wrapper in Python (ampkit/casting/wrappers.py), which is the specification of both. A Call lives as long as
// the process, like the functions of torch; an engine binds and unbinds it, and unbound it calls straight through.
#pragma once

#include <torch/csrc/autograd/python_variable.h>

#include <new>

#include "cast_store.h"
#include "switch.h"

namespace ampkit {

// As in ampkit.policy.cast_rules.CastKind, by what the fast path does: Call.bind is given the names.
enum class Kind { Lower, Fp32, Promote, MatchFirst, Reject, Banned, Native };

// What an engine gives a Call. Counted, since whatever runs during a call may have the engine closed.
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
  Switch* control;
  PyObject* slow;         // the wrapper in Python
  CastStore* store;       // null but for Kind::Lower
  PyObject* cast_weight;  // how Python casts a weight that is not in the store; null as above
};

struct Call {
  PyObject_HEAD
  PyMethodDef definition;
  PyObject* name;      // str
  PyObject* module;    // str: where pickle finds the function
  PyObject* doc;       // str or None
  PyObject* original;  // what is called in the end
  Binding* binding;    // null while no engine has it
};

extern PyTypeObject CallType;

}  // namespace ampkit
