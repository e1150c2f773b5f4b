// torch's operators on the simulated devices: their memory is host memory, so that the kernels for the CPU compute in it. While a stream
// is captured, what is computed is noted for the graph's replays, and undone when the capture ends.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy_native.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

extern "C" int simulated_is_capturing();  // on any stream
extern "C" void simulated_record(void (*run)(void*), void* what);

namespace {

using Stack = torch::jit::Stack;

at::Tensor on_host(const at::Tensor& tensor) {
  auto alias = at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                             at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

at::Tensor on_device(const at::Tensor& result, at::Device device) {
  const at::Tensor dense = result.is_non_overlapping_and_dense() ? result : result.contiguous();
  at::Tensor made = at::empty_strided(dense.sizes(), dense.strides(), dense.options().device(device));
  memcpy(made.mutable_data_ptr(), dense.const_data_ptr(), dense.nbytes());
  return made;
}

// The arguments of a call on the host, and which tensor each stands for.
struct Translated {
  Stack stack;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
  std::vector<std::pair<at::Tensor, at::Tensor>> resized;  // an output without elements, which the operator gives its size
  std::optional<at::Device> device;
  std::string strange;  // a tensor on another device
  bool counts_writes = false;

  at::Tensor operator()(const at::Tensor& tensor, bool is_written) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      if (tensor.dim() > 0) strange = tensor.device().str();
      return tensor;
    }
    if (device && *device != tensor.device()) strange = tensor.device().str();
    if (!device) device = tensor.device();
    if (is_written && tensor.dim() == 1 && tensor.numel() == 0) {
      resized.emplace_back(at::empty({0}, tensor.options().device(at::kCPU)), tensor);
      return resized.back().first;
    }
    pairs.emplace_back(on_host(tensor), tensor);
    if (is_written && counts_writes) tensor.unsafeGetTensorImpl()->bump_version();
    return pairs.back().first;
  }
};

bool takes_several_devices(const std::string& name) {
  for (const char* one : {"aten::_foreach", "aten::index", "aten::_index", "ampkit::", "aten::_amp_", "aten::_fused", "aten::copy_"})
    if (name.rfind(one, 0) == 0) return true;
  return false;
}

void call(const c10::OperatorHandle& op, Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  op.callBoxed(&stack);
}

void compute(const c10::OperatorHandle& op, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const std::string& name = op.schema().name();
  Translated translated;
  translated.counts_writes = name.rfind("aten::_foreach", 0) == 0;  // as torch's kernels for CUDA do
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue value = torch::jit::peek(*stack, i, arguments.size());
    const bool is_written = arguments[i].alias_info() != nullptr && arguments[i].alias_info()->isWrite();
    if (value.isTensor()) {
      value = translated(value.toTensor(), is_written);
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& one : value.toTensorVector()) list.push_back(translated(one, is_written));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& one : value.toOptionalTensorVector())
        list.push_back(one ? std::optional(translated(*one, false)) : std::nullopt);
      value = list;
    } else if (value.isDevice()) {
      if (value.toDevice().is_cuda() && !translated.device) translated.device = value.toDevice();
      value = at::Device(at::kCPU);
    } else if (value.isGenerator()) {
      value = c10::IValue();
    }
    translated.stack.push_back(std::move(value));
  }
  TORCH_CHECK(translated.strange.empty() || takes_several_devices(name), "Expected all tensors to be on the same device, but found at least two devices, ",
              translated.device->str(), " and ", translated.strange, "! (", name, ")");
  const at::Device device = translated.device.value_or(at::Device(at::kCUDA, 0));
  const bool capturing = simulated_is_capturing();
  Stack results = translated.stack;
  call(op, results);

  std::vector<std::pair<at::Tensor, size_t>> made;  // and the number of the result on the host
  size_t count = 0;
  const auto back = [&](const at::Tensor& result) -> at::Tensor {
    const size_t number = count++;
    if (!result.defined()) return result;
    for (const auto& [alias, tensor] : translated.pairs)
      if (alias.is_same(result)) return tensor;
    for (auto& [fresh, tensor] : translated.resized)
      if (fresh.is_same(result)) {
        tensor.resize_(fresh.sizes());
        if (fresh.numel() != 0) memcpy(tensor.mutable_data_ptr(), fresh.contiguous().const_data_ptr(), fresh.nbytes());
        return tensor;
      }
    at::Tensor one = on_device(result, device);
    made.emplace_back(on_host(one), number);
    return one;
  };
  torch::jit::drop(*stack, arguments.size());
  for (const c10::IValue& value : results) {
    if (value.isTensor()) {
      torch::jit::push(*stack, back(value.toTensor()));
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& one : value.toTensorVector()) list.push_back(back(one));
      torch::jit::push(*stack, list);
    } else {
      torch::jit::push(*stack, value);
    }
  }
  if (!capturing) return;
  for (c10::IValue& value : translated.stack)
    for (const auto& [fresh, tensor] : translated.resized)
      if (value.isTensor() && value.toTensor().is_same(fresh)) value = on_host(tensor);
  auto* again = new std::function<void()>([op, arguments = std::move(translated.stack), made] {
    Stack results = arguments;
    call(op, results);
    std::vector<at::Tensor> all;
    for (const c10::IValue& value : results) {
      if (value.isTensor()) all.push_back(value.toTensor());
      if (value.isTensorList())
        for (const at::Tensor& one : value.toTensorVector()) all.push_back(one);
    }
    for (const auto& [target, number] : made) const_cast<at::Tensor&>(target).copy_(all[number]);
  });
  simulated_record([](void* what) { (*static_cast<std::function<void()>*>(what))(); }, again);
}

void on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) { compute(op, stack); }

at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (!self.is_cuda() || !source.is_cuda()) return at::native::copy_(self, source, non_blocking);
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  Stack stack{self, source, non_blocking};
  compute(op, &stack);
  return self;
}

// What makes memory and views of it, or waits, is torch's own.
bool stays(const c10::OperatorHandle& op) {
  static const std::set<std::string> own{"empty", "empty_strided", "set_", "resize_", "record_stream", "_local_scalar_dense", "is_pinned",
                                         "_pin_memory", "is_set_to", "_lazy_clone", "_cudnn_init_dropout_state", "_efficientzerotensor"};
  const std::string name = op.schema().name();
  if (name.rfind("aten::", 0) != 0 || own.count(name.substr(6)) != 0) return true;
  for (const auto& one : op.schema().returns())
    if (one.alias_info() != nullptr && !one.alias_info()->isWrite()) return true;
  return false;
}

std::vector<c10::RegistrationHandleRAII>& registrations() {
  static auto* all = new std::vector<c10::RegistrationHandleRAII>();
  return *all;
}

const bool installed = [] {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
    const auto op = dispatcher.findSchema(name);
    if (op && !stays(*op))
      registrations().push_back(dispatcher.registerImpl(name, c10::DispatchKey::CUDA,
                                                        c10::KernelFunction::makeFromBoxedFunction<&on_cpu>(), std::nullopt,
                                                        nullptr, "simulated CUDA"));
  }
  return true;
}();

TORCH_LIBRARY_IMPL(aten, CUDA, m) { m.impl("copy_", copy); }

}  // namespace
