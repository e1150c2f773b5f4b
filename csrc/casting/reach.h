// The leaves of the graph of a loss, and whether gradients are unchanged: ampkit/iteration/reach.py and gradients.py.
#pragma once

#include <Python.h>

namespace ampkit {

// {"leaves_of": function, "seen": function, "are_still": function}
bool add_reach(PyObject* module);

}  // namespace ampkit
