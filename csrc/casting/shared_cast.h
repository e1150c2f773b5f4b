// Casts that ampkit makes or finds, recorded as autograd would have recorded a call of to().
#pragma once

#include <ATen/core/Tensor.h>

namespace ampkit {

// A weight's cast has the priority of the gradient's accumulation in the backward pass: it runs at once, as if the cast had been
// made at its use. So DDP sends gradients while others are computed.
constexpr uint64_t kAtOnce = UINT64_MAX;

// Gives the cast the edge to its source. In the backward pass the ready node with the highest `order` runs first.
void record_cast(const at::Tensor& source, const at::Tensor& cast, uint64_t order);

// The cast of a tensor for one more use: the same memory, with an edge of its own, so that the gradients of all uses add up
// in the tensor's precision and not in the cast's.
at::Tensor another_use_of(const at::Tensor& source, const at::Tensor& cast, uint64_t order);

// Whether forward-mode gradients are computed: shared memory does not carry these.
bool in_forward_mode();

}  // namespace ampkit
