// Casts that ampkit makes or finds, recorded as autograd would have recorded a call of to().
#pragma once

#include <ATen/core/Tensor.h>

namespace ampkit {

// The place of a weight's cast in the backward pass is the one of the gradient's accumulation: at once, as if it had been made
// where it is used. DDP sends gradients while others are computed.
constexpr uint64_t kAtOnce = UINT64_MAX;

// Gives the cast the edge to its source. The node with the highest `order` of those that are ready runs first in the backward pass.
void record_cast(const at::Tensor& source, const at::Tensor& cast, uint64_t order);

// The cast of a tensor for one more use: the same memory, with an edge of its own, so that the gradients of all uses are added up
// in the tensor's precision and not in the cast's.
at::Tensor another_use_of(const at::Tensor& source, const at::Tensor& cast, uint64_t order);

// Whether forward-mode gradients are computed, of which the memory knows nothing.
bool in_forward_mode();

}  // namespace ampkit
