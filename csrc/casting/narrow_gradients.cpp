#include "narrow_gradients.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_unique2.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Type.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_hook.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <mutex>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <unordered_set>
#include <utility>

namespace ampkit {

namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;
using torch::autograd::variable_list;
namespace impl = torch::autograd::impl;

bool is_reduced(const at::Tensor& tensor) { return at::isReducedFloatingType(tensor.scalar_type()); }

// Excludes the modes in which a script may read a gradient: none of them may change how it is widened.
struct PastAllModes {
  c10::InferenceMode inference{false};
  c10::impl::ExcludeDispatchKeyGuard modes{c10::DispatchKeySet(
      {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
       c10::DispatchKey::FuncTorchDynamicLayerBackMode})};
  at::AutoDispatchBelowAutograd below;
};

// Makes the gradient of a weight that takes narrow ones float32. The caller holds the weight's lock; a script that reads, the GIL.
void widen(at::Tensor& grad) {
  if (!grad.defined() || !is_reduced(grad) || grad.layout() != at::kStrided) return;
  const PastAllModes past;
  grad = grad.to(at::kFloat);
}

// The lock that AccumulateGrad holds while it changes a gradient.
struct LockOf : Node {
  static std::mutex& of(Node& node) { return node.*(&LockOf::mutex_); }
};

// torch adds a new gradient to the present one in place, in the present one's precision.
struct WidenFirst : torch::autograd::FunctionPreHook {
  explicit WidenFirst(c10::TensorImpl* weight) : weight(weight) {}

  variable_list operator()(const variable_list& grads) override {
    if (!grads[0].defined()) return grads;
    const at::Tensor tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(weight));
    widen(tensor.mutable_grad());
    return grads;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

  c10::TensorImpl* weight;  // it owns this hook
  int pass = -1;            // the backward pass that has made the narrow gradient
  bool has_rows = false;    // and has added rows to it
};

bool is_ours(const torch::autograd::FunctionPreHook& hook) { return typeid(hook) == typeid(WidenFirst); }

WidenFirst* hook_of(const at::Tensor& weight) {
  for (const auto& hook : impl::hooks(weight)) {
    if (is_ours(*hook)) return static_cast<WidenFirst*>(hook.get());
  }
  return nullptr;
}

// Whether a script's dict of hooks is empty. torch does not export the symbol that dynamic_cast needs: a name identifies the class.
template <class PyHooks, class Hook>
bool is_empty(const Hook& hook, const char* name) {
  if (c10::demangle(typeid(hook).name()) != name) return false;
  PyObject* dict = static_cast<const PyHooks&>(hook).dict;
  return PyDict_Check(dict) && reinterpret_cast<PyDictObject*>(dict)->ma_used == 0;
}

bool has_hooks(AccumulateGrad& node) {
  if (!node.pre_hooks().empty() || !node.post_hooks().empty()) return true;
  const auto& after = node.tensor_post_acc_grad_hooks();
  using After = torch::autograd::PyFunctionTensorPostAccGradHooks;
  if (after != nullptr && !is_empty<After>(*after, "torch::autograd::PyFunctionTensorPostAccGradHooks")) {
    return true;
  }
  using Before = torch::autograd::PyFunctionTensorPreHook;
  for (const auto& hook : node.tensor_pre_hooks()) {
    if (!is_ours(*hook) && !is_empty<Before>(*hook, "torch::autograd::PyFunctionTensorPreHook")) {
      return true;
    }
  }
  return false;
}

// Whether the gradient is accumulated on the stream that made it: other streams would have to wait for each other.
bool is_on_stream_of(AccumulateGrad& node, const at::Tensor& grad) {
  if (grad.is_cpu()) return true;
  const auto stream = node.stream();
  return stream.has_value() && *stream == c10::impl::VirtualGuardImpl(grad.device().type()).getStream(grad.device());
}

bool accumulates_alone(AccumulateGrad& node, const at::Tensor& grad) {
  const auto* info = torch::autograd::get_current_graph_task_exec_info();  // not empty: a pass for some inputs alone
  return !c10::GradMode::is_enabled() && (info == nullptr || info->empty()) &&
      !torch::autograd::AnomalyMode::is_enabled() && grad.layout() == at::kStrided && node.variable.requires_grad() &&
      takes_narrow_gradients(node.variable) && !has_hooks(node) && is_on_stream_of(node, grad);
}

// sum += grad on a CPU, in one pass: torch's own addition of two dtypes takes more than twice the time.
bool add_in_one_pass(const at::Tensor& sum, const at::Tensor& grad) {
  const auto is_plain = [](const at::Tensor& x) {
    return x.is_cpu() && x.layout() == at::kStrided && x.is_contiguous() && !x.is_inference() &&
        !x.unsafeGetTensorImpl()->is_python_dispatch();
  };
  if (!sum.defined() || sum.scalar_type() != at::kFloat || grad.scalar_type() != at::kBFloat16) return false;
  if (sum.sizes() != grad.sizes() || !is_plain(sum) || !is_plain(grad)) return false;
  float* to = sum.mutable_data_ptr<float>();
  const auto* from = grad.const_data_ptr<at::BFloat16>();
  constexpr int64_t kGrain = 32 * 1024;  // of torch's own loops
  torch::stable::parallel_for(0, sum.numel(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) to[i] += static_cast<float>(from[i]);
  });
  sum.unsafeGetTensorImpl()->bump_version();
  return true;
}

}  // namespace

bool takes_narrow_gradients(const at::Tensor& weight) {
  return weight.scalar_type() == at::kFloat && weight.is_leaf() && impl::get_autograd_meta(weight) != nullptr &&
      hook_of(weight) != nullptr;
}

variable_list HandOn::apply(variable_list&& grads) {
  auto* node = dynamic_cast<AccumulateGrad*>(next_edge(0).function.get());
  if (node == nullptr || !grads[0].defined() || !is_reduced(grads[0]) || !accumulates_alone(*node, grads[0])) {
    return ToCopyBackward0::apply(std::move(grads));
  }
  const std::lock_guard<std::mutex> lock(LockOf::of(*node));
  const at::Tensor grad = std::move(grads[0]);
  at::Tensor& there = node->variable.mutable_grad();
  widen(there);
  if (WidenFirst* hook = hook_of(node->variable)) {
    hook->pass = torch::autograd::get_current_graph_task_id();
    hook->has_rows = false;
  }
  if (add_in_one_pass(there, grad)) return variable_list(1);
  AccumulateGrad::accumulateGrad(node->variable, there, grad, 1, [&](at::Tensor&& sum) { there = std::move(sum); });
  return variable_list(1);
}

// The functions for Python.

namespace {

// Adds the gradients (float32) of rows of a table, which was indexed by `indices`, to the table's gradient, as `HandOn` would: in
// bfloat16, with sums over a row in float32. Returns false, and does nothing, if that is not allowed.
bool hand_on_rows(const at::Tensor& table, const at::Tensor& grad, const at::Tensor& indices, int64_t padding_index) {
  const auto accumulator = impl::try_get_grad_accumulator(table);
  auto* node = dynamic_cast<AccumulateGrad*>(accumulator.get());
  if (node == nullptr || grad.scalar_type() != at::kFloat || !accumulates_alone(*node, grad)) return false;
  at::AutoDispatchBelowAutograd below;
  const auto [rows, places, _] =
      at::_unique2(indices.reshape(-1).to(at::kLong), /*sorted=*/true, /*return_inverse=*/true);
  // torch's kernel sums the gradients of each row, for the used rows only.
  at::Tensor sums = at::embedding_dense_backward(grad.reshape({-1, table.size(1)}), places, rows.size(0), -1, false);
  if (padding_index >= 0) sums.masked_fill_((rows == padding_index).unsqueeze(1), 0.0);
  WidenFirst* hook = hook_of(table);
  const std::lock_guard<std::mutex> lock(LockOf::of(*node));
  at::Tensor& there = node->variable.mutable_grad();
  const int pass = torch::autograd::get_current_graph_task_id();
  if (!there.defined()) {
    there = at::zeros_like(table, table.options().dtype(at::kBFloat16));
    hook->pass = pass;
  } else if (hook->pass != pass || hook->has_rows) {  // a sum, but for the one gradient of a head that is tied to the table
    widen(there);
  }
  hook->has_rows = true;
  if (!is_reduced(there)) {
    there.index_add_(0, rows, sums);
  } else {
    const at::Tensor wide = there.index_select(0, rows).to(at::kFloat).add_(sums);
    there.index_copy_(0, rows, wide.to(there.scalar_type()));
  }
  return true;
}

thread_local bool reads_narrow = false;  // p.grad, in this thread

PyGetSetDef getset_of_torch(const char* name) {
  // Not the one of torch.Tensor, which ampkit's may have replaced.
  PyTypeObject* base = reinterpret_cast<PyTypeObject*>(THPVariableClass)->tp_base;
  const pybind11::object descriptor = pybind11::handle(reinterpret_cast<PyObject*>(base)).attr(name);
  return *reinterpret_cast<PyGetSetDescrObject*>(descriptor.ptr())->d_getset;
}

// torch's own "grad" and "_grad".
PyGetSetDef torchs[2];
PyGetSetDef ours[2];

PyObject* read_grad(PyObject* self, void* torchs_own) {
  const auto* own = static_cast<PyGetSetDef*>(torchs_own);
  PyObject* grad = own->get(self, own->closure);
  if (grad == nullptr || grad == Py_None || reads_narrow || !THPVariable_Check(grad) || !THPVariable_Check(self)) {
    return grad;
  }
  const at::Tensor& weight = THPVariable_Unpack(self);
  if (!is_reduced(THPVariable_Unpack(grad)) || !takes_narrow_gradients(weight)) return grad;
  Py_DECREF(grad);
  HANDLE_TH_ERRORS
  if (auto accumulator = impl::try_get_grad_accumulator(weight)) {
    // An accumulating thread may hold the lock and wait for the GIL. Other readers wait for the GIL.
    pybind11::gil_scoped_release without_gil;
    const std::lock_guard<std::mutex> lock(LockOf::of(*accumulator));
    pybind11::gil_scoped_acquire with_gil;
    widen(weight.mutable_grad());
  } else {
    widen(weight.mutable_grad());
  }
  return own->get(self, own->closure);
  END_HANDLE_TH_ERRORS
}

// Weights whose gradients a block has set aside, until a script drops these by writing None to p.grad. Under the GIL.
std::unordered_set<const c10::TensorImpl*> set_aside;

constexpr const char* kAdded =
    "ampkit: p.grad was assigned inside of a scale_loss block, which has set the gradients of earlier passes aside: at its end they are "
    "added to what is assigned. Call optimizer.zero_grad() before the block if it is to replace them.";

// A float32 weight takes gradients of every floating dtype and converts them to float32, unless a script has set
// grad_dtype = None. A weight in lower precision keeps float32 gradients.
int write_grad(PyObject* self, PyObject* value, void* torchs_own) {
  const auto* own = static_cast<PyGetSetDef*>(torchs_own);
  if ((value == nullptr || value == Py_None) && THPVariable_Check(self)) {
    set_aside.erase(THPVariable_Unpack(self).unsafeGetTensorImpl());
  }
  if (value == nullptr || !THPVariable_CheckExact(value) || !THPVariable_Check(self)) {
    return own->set(self, value, own->closure);
  }
  HANDLE_TH_ERRORS
  const at::Tensor &weight = THPVariable_Unpack(self), &grad = THPVariable_Unpack(value);
  if (set_aside.count(weight.unsafeGetTensorImpl()) > 0 && THPVariable_CheckExact(self) && weight.is_leaf() &&
      !weight.grad().defined() && PyErr_WarnEx(PyExc_UserWarning, kAdded, 1) < 0) {
    return -1;
  }
  const bool fits = grad.scalar_type() == at::kFloat || weight.scalar_type() != at::kFloat ||
      !at::isFloatingType(grad.scalar_type());
  const auto* meta = impl::get_autograd_meta(weight);
  if (!fits && (meta == nullptr || !meta->allow_grad_dtype_mismatch_ || takes_narrow_gradients(weight))) {
    THPObjectPtr wide(THPVariable_Wrap(grad.to(at::kFloat)));
    return wide ? own->set(self, wide.get(), own->closure) : -1;
  }
  if (grad.scalar_type() == at::kFloat && is_reduced(weight) && weight.is_leaf()) weight.set_grad_dtype(std::nullopt);
  return own->set(self, value, own->closure);
  END_HANDLE_TH_ERRORS_RET(-1)
}

void follow_dtype(const at::Tensor& weight) {
  auto* meta = impl::get_autograd_meta(weight);
  if (meta == nullptr || (!meta->allow_grad_dtype_mismatch_ && !meta->grad_dtype_.has_value())) return;
  weight.set_grad_dtype(weight.scalar_type());  // for an existing accumulation
  meta->grad_dtype_.reset();
}

void take_narrow_gradients(const at::Tensor& weight) {
  weight.set_grad_dtype(std::nullopt);
  if (hook_of(weight) != nullptr) return;
  impl::hooks(weight).push_back(std::make_unique<WidenFirst>(weight.unsafeGetTensorImpl()));
}

void take_none_any_more(const at::Tensor& weight) {
  if (!weight.is_leaf() || impl::get_autograd_meta(weight) == nullptr || hook_of(weight) == nullptr) return;
  if (weight.scalar_type() == at::kFloat) widen(weight.mutable_grad());
  auto& hooks = impl::hooks(weight);
  const auto kept = std::remove_if(hooks.begin(), hooks.end(), [](const auto& hook) { return is_ours(*hook); });
  hooks.erase(kept, hooks.end());
  follow_dtype(weight);
}

void note_set_aside(const at::Tensor& weight) { set_aside.insert(weight.unsafeGetTensorImpl()); }

bool is_set_aside(const at::Tensor& weight) { return set_aside.erase(weight.unsafeGetTensorImpl()) > 0; }

// A function of a tensor for Python, which pybind11 would call more slowly: some are called for each parameter.
template <auto kFunction>
PyObject* of_tensor(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(THPVariable_Check(object), "expected a Tensor, found a ", Py_TYPE(object)->tp_name);
  const at::Tensor& tensor = THPVariable_Unpack(object);
  if constexpr (std::is_void_v<decltype(kFunction(tensor))>) {
    kFunction(tensor);
    Py_RETURN_NONE;
  } else {
    return PyBool_FromLong(kFunction(tensor));
  }
  END_HANDLE_TH_ERRORS
}

PyObject* takes_narrow(PyObject*, PyObject* weight) {
  return PyBool_FromLong(THPVariable_Check(weight) && takes_narrow_gradients(THPVariable_Unpack(weight)));
}

PyObject* stored_gradient(PyObject*, PyObject* weight) {
  if (!THPVariable_Check(weight)) return PyErr_Format(PyExc_TypeError, "expected a Tensor");
  return torchs[0].get(weight, torchs[0].closure);
}

PyObject* read_narrow(PyObject*, PyObject* flag) {
  return PyBool_FromLong(std::exchange(reads_narrow, flag == Py_True));
}

PyMethodDef functions[] = {
    {"take_narrow_gradients", of_tensor<take_narrow_gradients>, METH_O, nullptr},
    {"take_none_any_more", of_tensor<take_none_any_more>, METH_O, nullptr},
    {"follow_dtype", of_tensor<follow_dtype>, METH_O, nullptr},
    {"takes_narrow_gradients", takes_narrow, METH_O, nullptr},
    {"note_set_aside", of_tensor<note_set_aside>, METH_O, nullptr},
    {"is_set_aside", of_tensor<is_set_aside>, METH_O, nullptr},
    {"stored_gradient", stored_gradient, METH_O, nullptr},
    {"read_narrow", read_narrow, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

// Functions, and the descriptors "grad" and "_grad" for torch.Tensor.
void add_narrow_gradients(pybind11::module_& module) {
  const char* names[] = {"grad", "_grad"};
  for (int i = 0; i < 2; ++i) {
    torchs[i] = getset_of_torch(names[i]);
    ours[i] = {torchs[i].name, read_grad, write_grad, torchs[i].doc, &torchs[i]};
    PyObject* descriptor = PyDescr_NewGetSet(reinterpret_cast<PyTypeObject*>(THPVariableClass), &ours[i]);
    module.attr(names[i]) = pybind11::reinterpret_steal<pybind11::object>(descriptor);
  }
  module.def("hand_on_rows", torch::wrap_pybind_function_no_gil(hand_on_rows));
  if (PyModule_AddFunctions(module.ptr(), functions) < 0) throw pybind11::error_already_set();
}

}  // namespace ampkit
