// Whether Calls cast in this thread, and on which devices: torch.autocast's own state, read for an engine. The
// C++ twin of ampkit.casting.state.CastingState, which explains it.
#pragma once

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/python_variable.h>

namespace ampkit {

struct Switch {
  PyObject_HEAD
  char installed;
  char stores;                      // some models have narrow results
  int count;                        // of the device types whose tensors are cast
  c10::DeviceType device_types[8];  // first those that torch.autocast knows
  int known;                        // how many these are
  at::ScalarType torchs_choice[8];  // what torch.autocast casts to there by default
  at::ScalarType lower_precision;
  c10::DispatchKeySet keys;         // of torch.autocast, for the known ones
};

// The dispatch keys of this thread: looked up once in a call, since every lookup goes through the loader's tables.
using ThreadKeys = c10::impl::PODLocalDispatchKeySet;
inline ThreadKeys& keys_of_this_thread() { return c10::impl::raw_local_dispatch_key_set; }

// Whether a call made now, in the thread of these keys, is cast.
inline bool is_on(const Switch* control, const ThreadKeys& thread) {
  return control->installed && (control->keys & thread.excluded()) != control->keys;
}

// Whether torch.autocast is on in the thread of these keys while the engine is off: torch may have restored a state that the
// engine had switched off, which Python finds out.
inline bool is_left_on(const Switch* control, const ThreadKeys& thread) {
  return !control->installed && (control->keys & thread.excluded()) != control->keys;
}

// Whether a tensor lies on a device whose tensors are cast, if `is_on`.
inline bool is_on_our_device(const Switch* control, const at::Tensor& tensor) {
  const c10::DeviceType type = tensor.device().type();
  for (int i = 0; i < control->count; ++i) {
    if (control->device_types[i] != type) continue;
    return i >= control->known || at::autocast::is_autocast_enabled(type);
  }
  return false;
}

// "Narrow results" in ampkit/casting/NOTES.md.
inline bool is_narrow(const Switch* control) { return control->stores && at::autocast::is_autocast_cache_enabled(); }

// Whether a region of torch.autocast asks for a lower precision that is neither the session's nor torch's default.
inline bool wants_other_precision(const Switch* control) {
  for (int i = 0; i < control->known; ++i) {
    const at::ScalarType dtype = at::autocast::get_autocast_dtype(control->device_types[i]);
    if (dtype != control->lower_precision && (dtype != control->torchs_choice[i] || is_narrow(control))) return true;
  }
  return false;
}

extern PyTypeObject SwitchType;

}  // namespace ampkit
