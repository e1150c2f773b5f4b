// ampkit/_casting, which knows torch's own structures, gives the libraries of kernels, which only know the stable ABI, the
// tensors behind Python objects, so that a call need not go through the dispatcher (direct.h).
#pragma once

#include <Python.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>

namespace ampkit {

struct TensorAccess {
  // True if no mode, transform, trace or profiler observes operators that this thread calls.
  bool (*is_unobserved)();
  // The tensor of this object, borrowed; it lives as long as the object. nullptr unless it is plain: of torch's own class, or of
  // one that treats functions of torch no differently, with memory of its own and not lazy.
  AtenTensorHandle (*plain_tensor)(PyObject* object);
  // A new object, which takes the tensor over.
  PyObject* (*wrap)(AtenTensorHandle tensor);
  // torch counts the writes of its own operators only. Autograd's checks and weight-cast caches read the count.
  void (*count_write)(AtenTensorHandle tensor);
};

constexpr const char* kTensorAccess = "ampkit._casting.tensor_access";  // of the capsule

}  // namespace ampkit
