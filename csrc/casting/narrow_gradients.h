// Gradients of large float32 weights that stay in lower precision until a script reads them: ampkit/casting/narrow_gradients.py
// explains the functions.
#pragma once

#include <Python.h>
#include <torch/csrc/autograd/generated/Functions.h>

namespace ampkit {

// Whether a session lets the gradients of this float32 leaf be in lower precision. A hook marks such a weight.
bool takes_narrow_gradients(const at::Tensor& weight);

// The cast of a weight in the graph. It passes its gradient to the weight in the cast's precision, where sums are float32, if
// nothing but torch's own accumulation would take the gradient. Otherwise it does what the node of to() does.
struct HandOn : public torch::autograd::generated::ToCopyBackward0 {
  using ToCopyBackward0::ToCopyBackward0;
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;
};

}  // namespace ampkit
