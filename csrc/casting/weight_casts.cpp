#include "weight_casts.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty_like.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/utils/object_ptr.h>

#include <vector>

#include "shared_cast.h"

namespace ampkit {

namespace {

// On the CPU a large cast is best made at its use, while it is in the caches.
constexpr int64_t kSmallOnCpu = 1 << 15;

bool is_worth_casting_ahead(const at::Tensor& weight) { return !weight.is_cpu() || weight.numel() <= kSmallOnCpu; }

// Sharding frees a weight between its uses.
bool is_allocated(const at::Tensor& weight) { return weight.numel() == 0 || weight.storage().nbytes() > 0; }

// The weights used by the last call that began with `weight` which may be cast in one go with it.
std::vector<THPObjectPtr> companions_of(CastStore* store, PyObject* weight) {
  const at::Tensor& first = THPVariable_Unpack(weight);
  std::vector<THPObjectPtr> found;
  auto last = store->companions.find(weight);
  if (last == store->companions.end() || referent(last->second.front().get()).get() != weight) return found;
  for (THPObjectPtr& reference : last->second) {
    THPObjectPtr other = referent(reference.get());
    if (other.get() == weight || !other || Py_TYPE(other.get()) != Py_TYPE(weight)) continue;
    const at::Tensor& tensor = THPVariable_Unpack(other.get());
    const bool fits = tensor.requires_grad() && tensor.is_leaf() && tensor.scalar_type() == first.scalar_type() &&
        tensor.device() == first.device() && is_plain_weight(tensor) && is_allocated(tensor) &&
        is_worth_casting_ahead(tensor);
    if (fits && store->usable(other.get()) == nullptr) found.push_back(std::move(other));
  }
  return found;
}

// Casts the weights with one call, each with an edge of its own to its weight, and keeps the casts. Releases the GIL, like torch's
// own bindings: a thread that holds the lock of a weight's autograd state may be waiting for the GIL.
PyObject* cast_together(CastStore* store, std::vector<THPObjectPtr> weights, at::ScalarType dtype, bool records) {
  std::vector<at::Tensor> tensors, casts;
  std::vector<Stamp> stamps;
  std::vector<c10::Storage> held;
  for (THPObjectPtr& object : weights) {
    tensors.push_back(THPVariable_Unpack(object.get()));
    held.push_back(tensors.back().storage());
    stamps.push_back(store->stamp(tensors.back()));
  }
  {
    pybind11::gil_scoped_release without_gil;
    {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      for (const at::Tensor& weight : tensors) casts.push_back(at::empty_like(weight, weight.options().dtype(dtype)));
      at::_foreach_copy_(casts, tensors);
    }
    for (size_t i = 0; records && i < casts.size(); ++i) record_cast(tensors[i], casts[i], kAtOnce);
  }
  store->casts_made += static_cast<Py_ssize_t>(weights.size());
  THPObjectPtr asked_for;
  for (size_t i = 0; i < weights.size(); ++i) {
    THPObjectPtr cast(THPVariable_Wrap(std::move(casts[i])));
    const bool keeps = cast && means_the_same(cast.get());
    if (!cast || (keeps && !store->keep(weights[i].get(), cast.get(), stamps[i], /*used=*/i == 0))) return nullptr;
    if (i == 0) asked_for = std::move(cast);
  }
  return asked_for.release();
}

}  // namespace

constexpr c10::DispatchKeySet kWrappers(
    {c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper});

bool is_plain_weight(const at::Tensor& weight) {
  // Python handles forward-mode gradients. Asking the weight for one would take a lock of its autograd state: see above.
  return weight.layout() == at::kStrided && weight.has_storage() && !weight.is_inference() &&
      !weight.key_set().has_any(kWrappers) && !in_forward_mode();
}

bool means_the_same(PyObject* cast) {
  const at::Tensor& tensor = THPVariable_Unpack(cast);
  return THPVariable_CheckExact(cast) && !tensor.key_set().has_any(kWrappers) &&
      !(c10::GradMode::is_enabled() && tensor.is_inference());
}

PyObject* make_weight_cast(CastStore* store, PyObject* weight, at::ScalarType dtype) {
  if (PyObject* found = store->find(weight)) return Py_NewRef(found);
  if (PyObject* use = store->another_use(weight); use != nullptr || PyErr_Occurred()) return use;
  RECORD_USER_SCOPE("ampkit: cast weights");  // as its twin, casting/state.py, does
  const at::Tensor& tensor = THPVariable_Unpack(weight);
  const bool records = c10::GradMode::is_enabled() && !c10::InferenceMode::is_enabled() && tensor.requires_grad();
  std::vector<THPObjectPtr> weights;
  if (records && store->lifetime_of(weight) != kNotKept && is_worth_casting_ahead(tensor)) {
    weights = companions_of(store, weight);
  }
  weights.emplace(weights.begin(), Py_NewRef(weight));
  return cast_together(store, std::move(weights), dtype, records);
}

}  // namespace ampkit
