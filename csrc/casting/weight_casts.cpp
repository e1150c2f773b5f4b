#include "weight_casts.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/to_ops.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/utils/object_ptr.h>

#include <vector>

#include "shared_cast.h"

namespace ampkit {

namespace {

// On the CPU a large cast is best made where it is used, while it is in the caches.
constexpr int64_t kSmallOnCpu = 1 << 15;

bool is_worth_casting_ahead(const at::Tensor& weight) { return !weight.is_cpu() || weight.numel() <= kSmallOnCpu; }

// Sharding frees a weight between its uses.
bool is_allocated(const at::Tensor& weight) { return weight.numel() == 0 || weight.storage().nbytes() > 0; }

// The weights that the last forward pass used and that may be cast in one go with `weight`.
std::vector<THPObjectPtr> companions_of(CastStore* store, PyObject* weight) {
  const at::Tensor& first = THPVariable_Unpack(weight);
  bool contains_first = false;
  std::vector<THPObjectPtr> found;
  for (PyObject* reference : store->last_used) {
    THPObjectPtr other = referent(reference);
    if (other.get() == weight) contains_first = true;
    if (other.get() == weight || !other || Py_TYPE(other.get()) != Py_TYPE(weight)) continue;
    const at::Tensor& tensor = THPVariable_Unpack(other.get());
    const bool fits = tensor.requires_grad() && tensor.is_leaf() && tensor.scalar_type() == first.scalar_type() &&
        tensor.device() == first.device() && is_plain_weight(tensor) && is_allocated(tensor) &&
        is_worth_casting_ahead(tensor);
    if (fits && store->with_grad.find(other.get()) == store->with_grad.end()) found.push_back(std::move(other));
  }
  if (!contains_first) found.clear();
  return found;
}

// The place of a weight's cast in the backward pass is the one of the gradient's accumulation: at once, as if it had been made
// where it is used. DDP sends gradients while others are computed.
constexpr uint64_t kAtOnce = UINT64_MAX;

// Casts them with one call, each with an edge of its own to its weight. Without the GIL, as torch's own bindings call
// autograd: a thread that holds the lock of a weight's autograd state may be waiting for it.
std::vector<at::Tensor> cast_together(const std::vector<at::Tensor>& weights, at::ScalarType dtype) {
  pybind11::gil_scoped_release without_gil;
  std::vector<at::Tensor> casts;
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (const at::Tensor& weight : weights) casts.push_back(at::empty_like(weight, weight.options().dtype(dtype)));
    at::_foreach_copy_(casts, weights);
  }
  for (size_t i = 0; i < weights.size(); ++i) record_cast(weights[i], casts[i], kAtOnce);
  return casts;
}

PyObject* cast_with_companions(CastStore* store, PyObject* weight, std::vector<THPObjectPtr> weights, at::ScalarType dtype) {
  weights.emplace(weights.begin(), Py_NewRef(weight));
  std::vector<at::Tensor> tensors;
  std::vector<Stamp> stamps;
  std::vector<c10::Storage> held;
  for (THPObjectPtr& object : weights) {
    tensors.push_back(THPVariable_Unpack(object.get()));
    held.push_back(tensors.back().storage());
    stamps.push_back(store->stamp(tensors.back()));
  }
  std::vector<at::Tensor> made = cast_together(tensors, dtype);
  store->casts_made += static_cast<Py_ssize_t>(weights.size());
  THPObjectPtr asked_for;
  for (size_t i = 0; i < weights.size(); ++i) {
    THPObjectPtr cast(THPVariable_Wrap(std::move(made[i])));
    if (cast.get() == nullptr || !store->keep(weights[i].get(), cast.get(), stamps[i], /*used=*/i == 0)) return nullptr;
    if (i == 0) asked_for = std::move(cast);
  }
  return asked_for.release();
}

}  // namespace

bool is_plain_weight(const at::Tensor& weight) {
  // Forward-mode gradients are for Python. Asking the weight for one would take a lock of its autograd state: see above.
  constexpr c10::DispatchKeySet wrappers(
      {c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper});
  return weight.layout() == at::kStrided && weight.has_storage() && !weight.is_inference() &&
      !weight.key_set().has_any(wrappers) && !in_forward_mode();
}

PyObject* make_weight_cast(CastStore* store, PyObject* weight, at::ScalarType dtype) {
  RECORD_USER_SCOPE("ampkit: cast weights");  // as ampkit/labels.py does
  const at::Tensor& tensor = THPVariable_Unpack(weight);
  const bool recording = c10::GradMode::is_enabled();
  if (recording && !c10::InferenceMode::is_enabled() && !store->in_backward && tensor.requires_grad() && is_worth_casting_ahead(tensor)) {
    std::vector<THPObjectPtr> companions = companions_of(store, weight);
    if (!companions.empty()) return cast_with_companions(store, weight, std::move(companions), dtype);
  }
  const c10::Storage held = tensor.storage();
  const Stamp made_of = store->stamp(tensor);
  at::Tensor made;
  {
    pybind11::gil_scoped_release without_gil;
    made = at::_ops::to_dtype::call(tensor, dtype, /*non_blocking=*/false, /*copy=*/false, std::nullopt);
  }
  ++store->casts_made;
  const bool kept = recording ? !made.is_inference() : store->keep_without_grad;
  PyObject* cast = THPVariable_Wrap(std::move(made));
  if (cast != nullptr && kept && !store->keep(weight, cast, made_of, /*used=*/true)) Py_CLEAR(cast);
  return cast;
}

}  // namespace ampkit
