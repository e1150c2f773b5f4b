// Whether Calls cast in this thread, and on which devices: torch.autocast's own state, read for an engine. The
// C++ twin of ampkit.casting.state.CastingState, which explains it.
#pragma once

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <vector>

namespace ampkit {

struct Switch {
  bool installed = false;
  bool stores = false;                        // some models have narrow results
  std::vector<c10::DeviceType> known;         // those that torch.autocast knows, of the device types whose tensors are cast
  std::vector<at::ScalarType> torchs_choice;  // what torch.autocast casts to there by default
  std::vector<c10::DeviceType> followers;     // the others
  at::ScalarType lower_precision = at::ScalarType::Undefined;
  c10::DispatchKeySet keys;                   // of torch.autocast, for the known ones
};

// The dispatch keys of this thread: looked up once in a call, since every lookup goes through the loader's tables.
using ThreadKeys = c10::impl::PODLocalDispatchKeySet;
inline ThreadKeys& keys_of_this_thread() { return c10::impl::raw_local_dispatch_key_set; }

// Whether a call made now, in the thread of these keys, is cast.
inline bool is_on(const Switch& control, const ThreadKeys& thread) {
  return control.installed && (control.keys & thread.excluded()) != control.keys;
}

// Whether torch.autocast is on in the thread of these keys while the engine is off: torch may have restored a state that the
// engine had switched off, which Python finds out.
inline bool is_left_on(const Switch& control, const ThreadKeys& thread) {
  return !control.installed && (control.keys & thread.excluded()) != control.keys;
}

// Whether a tensor lies on a device whose tensors are cast, if `is_on`.
inline bool is_on_our_device(const Switch& control, const at::Tensor& tensor) {
  const c10::DeviceType type = tensor.device().type();
  const auto has = [&](const auto& types) { return std::find(types.begin(), types.end(), type) != types.end(); };
  return has(control.known) ? at::autocast::is_autocast_enabled(type) : has(control.followers);
}

// "Narrow results" in ampkit/casting/NOTES.md.
inline bool is_narrow(const Switch& control) { return control.stores && at::autocast::is_autocast_cache_enabled(); }

// Whether a region of torch.autocast asks for a lower precision that is neither the session's nor torch's default.
inline bool wants_other_precision(const Switch& control) {
  for (size_t i = 0; i < control.known.size(); ++i) {
    const at::ScalarType dtype = at::autocast::get_autocast_dtype(control.known[i]);
    if (dtype != control.lower_precision && (dtype != control.torchs_choice[i] || is_narrow(control))) return true;
  }
  return false;
}

}  // namespace ampkit
