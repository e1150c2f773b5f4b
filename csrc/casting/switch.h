// Whether Calls cast, in which threads and on which devices: what an engine says to all of its Calls at once.
#pragma once

#include <torch/csrc/autograd/python_variable.h>

namespace ampkit {

struct Switch {
  PyObject_HEAD
  char enabled;
  PyObject* suspended;     // set of the threads in which casting is off
  PyObject* device_types;  // set of the device types whose tensors are cast
};

// Whether a tensor lies on a device whose tensors are cast: 1, 0, or -1 with a Python exception.
int is_on_our_device(const Switch* control, const at::Tensor& tensor);

extern PyTypeObject SwitchType;

}  // namespace ampkit
