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

// Adds the gradients (float32) of rows of a table, which was indexed by `indices`, to the table's gradient, as `HandOn` would: in
// bfloat16, with sums over a row in float32. Returns false, and does nothing, if that is not allowed.
bool hand_on_rows(const at::Tensor& table, const at::Tensor& grad, const at::Tensor& indices, int64_t padding_index);

// {"take_narrow_gradients": function, ...}, and the descriptors "grad" and "_grad" for torch.Tensor.
bool add_narrow_gradients(PyObject* module);

}  // namespace ampkit
