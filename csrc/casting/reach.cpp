// The leaves of the graph of a loss, and whether gradients are unchanged: ampkit/iteration/reach.py and gradients.py.
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/python_variable.h>

#include <pybind11/pybind11.h>

#include <cstring>
#include <memory>
#include <typeinfo>
#include <unordered_set>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace ampkit {

namespace {

using torch::autograd::Node;

// torch exports no symbol of this class.
bool is_python(Node& node) { return std::strstr(typeid(node).name(), "autograd6PyNode") != nullptr; }

// leaves_of(tensors) -> (leaves, whether a function in Python is among the nodes)
py::tuple leaves_of(const py::list& tensors) {
  std::vector<Node*> pending;
  std::unordered_set<Node*> met;
  const auto meet = [&](Node* node) {
    if (node != nullptr && met.insert(node).second) pending.push_back(node);
  };
  for (const auto one : tensors) {
    if (THPVariable_Check(one.ptr())) meet(THPVariable_Unpack(one.ptr()).grad_fn().get());
  }
  py::list leaves;
  bool has_python = false;
  for (size_t i = 0; i < pending.size(); ++i) {
    if (auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(pending[i])) {
      leaves.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(leaf->variable)));
    } else if (is_python(*pending[i])) {
      has_python = true;
    }
    for (const auto& edge : pending[i]->next_edges()) meet(edge.function.get());
  }
  return py::make_tuple(leaves, has_python);
}

// The earlier gradients of a list of parameters, which it does not keep alive.
struct Seen {
  struct One {
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> gradient;
    uint32_t version;
  };
  std::vector<One> all;
};

const at::Tensor& gradient_of(PyObject* param) { return THPVariable_Unpack(param).mutable_grad(); }

// seen(params) -> an object for `are_still`
py::object seen(const py::list& params) {
  auto found = std::make_unique<Seen>();
  found->all.reserve(params.size());
  for (const auto param : params) {
    const at::Tensor& gradient = gradient_of(param.ptr());
    const auto version = gradient.defined() && !gradient.is_inference() ? gradient._version() : 0;
    found->all.push_back({decltype(Seen::One::gradient)(gradient.getIntrusivePtr()), static_cast<uint32_t>(version)});
  }
  return py::capsule(found.release(), [](void* seen) { delete static_cast<Seen*>(seen); });
}

// are_still(seen, params): whether the gradients are the same tensors, with no write since that torch has counted
bool are_still(const py::capsule& before, const py::list& params) {
  const auto& all = before.get_pointer<Seen>()->all;
  if (all.size() != params.size()) return false;
  for (size_t i = 0; i < all.size(); ++i) {
    const at::Tensor& gradient = gradient_of(params[i].ptr());
    if (gradient.unsafeGetTensorImpl() != all[i].gradient._unsafe_get_target()) return false;
    if (!gradient.defined()) continue;
    if (gradient.is_inference() || static_cast<uint32_t>(gradient._version()) != all[i].version) return false;
  }
  return true;
}

}  // namespace

void add_reach(py::module_& module) {
  module.def("leaves_of", &leaves_of);
  module.def("seen", &seen);
  module.def("are_still", &are_still);
}

}  // namespace ampkit
