#include "shared_cast.h"

#include "narrow_gradients.h"

#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <pybind11/pybind11.h>

#include <type_traits>

namespace ampkit {

namespace {

// torch 2.11 holds nodes in a std::shared_ptr with a deleter of torch's, torch 2.15 in an intrusive_ptr: an edge shows which.
using NodePointer = decltype(torch::autograd::Edge::function);

template <typename Node>
auto make_node(uint64_t order) {
  if constexpr (std::is_same_v<NodePointer, std::shared_ptr<torch::autograd::Node>>)
    return std::shared_ptr<Node>(new Node(order), [](auto* node) { deleteNode(node); });
  else
    return c10::make_intrusive<Node>(order);
}

// torch.autograd.graph.node_creation_hook, if torch has it.
template <typename Pointer, typename Node>
void call_creation_hooks(const Node& node) {
  if constexpr (requires(const Pointer& any) { fire_node_creation_hooks(any); }) {
    fire_node_creation_hooks(Pointer(node));
  }
}

template <typename Node>
void record(const at::Tensor& source, const at::Tensor& cast, uint64_t order) {
  auto node = make_node<Node>(order);
  node->set_next_edges(torch::autograd::collect_next_edges(source));
  node->self_options = source.options();
  torch::autograd::set_history(cast, node);
  call_creation_hooks<NodePointer>(node);
}

}  // namespace

void record_cast(const at::Tensor& source, const at::Tensor& cast, uint64_t order) {
  if (!takes_narrow_gradients(source)) return record<torch::autograd::generated::ToCopyBackward0>(source, cast, order);
  record<HandOn>(source, cast, order);
}

at::Tensor another_use_of(const at::Tensor& source, const at::Tensor& cast, uint64_t order) {
  if (!source.requires_grad()) return cast;
  // Like torch's own bindings when they call autograd: see weight_casts.cpp.
  pybind11::gil_scoped_release without_gil;
  c10::TensorImpl* impl = cast.unsafeGetTensorImpl();
  at::Tensor use(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true));
  record_cast(source, use, order);
  return use;
}

bool in_forward_mode() { return torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr; }

}  // namespace ampkit
