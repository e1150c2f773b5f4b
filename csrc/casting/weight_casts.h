// Casts of weights that are not in the store yet: of one weight, or of all that the last call used together with it.
#pragma once

#include "cast_store.h"

namespace ampkit {

// Whether a cast of this weight can be made and kept here; Python decides about all others.
bool is_plain_weight(const at::Tensor& weight);

// Whether a later call may use the cast: not if it belongs to a transform that runs now, or to inference mode.
bool means_the_same(PyObject* cast);

// A new reference to the cast of a plain weight, kept for its `lifetime_of`; null with an exception.
PyObject* make_weight_cast(CastStore* store, PyObject* weight, at::ScalarType dtype);

}  // namespace ampkit
