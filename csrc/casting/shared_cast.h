// Casts that ampkit makes or finds, recorded as autograd would have recorded a call of to().
#pragma once

#include <ATen/core/Tensor.h>

namespace ampkit {

// Gives the cast the edge to its source. The node with the highest `order` of those that are ready runs first in the backward pass.
void record_cast(const at::Tensor& source, const at::Tensor& cast, uint64_t order);

// The cast of an activation for one more function: the same memory, with an edge of its own, so that the gradients of all uses
// are added up in the activation's precision and not in the cast's.
at::Tensor another_use_of(const at::Tensor& activation, const at::Tensor& cast);

// Whether forward-mode gradients are computed, of which the memory knows nothing.
bool in_forward_mode();

}  // namespace ampkit
