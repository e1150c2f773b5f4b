// Casts of weights that are not in the store yet: one, or all that the last call used together with it.
#pragma once

#include "cast_store.h"

namespace ampkit {

// Whether a cast of this weight can be made and kept here; the rest is for Python to decide.
bool is_plain_weight(const at::Tensor& weight);

// Whether the cast means the same to a later call: not where it belongs to a transform that runs now, or to inference mode.
bool means_the_same(PyObject* cast);

// A new reference to the cast of a plain weight, which is kept as long as `lifetime_of` says; null with an exception.
PyObject* make_weight_cast(CastStore* store, PyObject* weight, at::ScalarType dtype);

}  // namespace ampkit
