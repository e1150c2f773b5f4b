#include "shared_cast.h"

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <pybind11/pybind11.h>

namespace ampkit {

void record_cast(const at::Tensor& source, const at::Tensor& cast, uint64_t order) {
  using torch::autograd::generated::ToCopyBackward0;
  auto node = std::shared_ptr<ToCopyBackward0>(new ToCopyBackward0(order), torch::autograd::deleteNode);
  node->set_next_edges(torch::autograd::collect_next_edges(source));
  node->self_options = source.options();
  torch::autograd::set_history(cast, node);
}

at::Tensor another_use_of(const at::Tensor& activation, const at::Tensor& cast) {
  if (!cast.requires_grad()) return cast;
  // As torch's own bindings call autograd: see weight_casts.cpp.
  pybind11::gil_scoped_release without_gil;
  c10::TensorImpl* impl = cast.unsafeGetTensorImpl();
  at::Tensor use(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true));
  record_cast(activation, use, at::sequence_number::get_and_increment());
  return use;
}

bool in_forward_mode() { return torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr; }

}  // namespace ampkit
