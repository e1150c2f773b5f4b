// The rule of a dynamic loss scale, as in DynamicLossScale (ampkit/iteration/loss_scale.py), and its count of skips. Products are
// float64, rounded once.
#pragma once

#include <cstdint>

#include "functors/macros.h"

namespace ampkit {

// The words of ``state``; other code counts the last one.
struct ScaleState {
  float scale;
  int32_t unskipped, overflows_left, skips, skips_in_a_row, skips_at_floor, skips_apart;
};

struct UpdateScaleFunctor {
  double growth_factor, backoff_factor;
  int64_t growth_interval, hysteresis;
  float min_scale, max_scale;

  AMPKIT_INLINE void operator()(ScaleState& state, float found_inf) const {
    if (found_inf != 0.0f) {
      state.skips += 1;
      state.skips_in_a_row += 1;
      state.skips_at_floor = state.scale <= min_scale ? state.skips_at_floor + 1 : 0;
      state.unskipped = 0;
      state.overflows_left -= 1;
      if (state.overflows_left > 0) return;
      const float lower = static_cast<float>(state.scale * backoff_factor);
      state.scale = lower < min_scale ? min_scale : lower;
      return;
    }
    state.skips_in_a_row = state.skips_at_floor = 0;
    state.overflows_left = static_cast<int32_t>(hysteresis);
    state.unskipped += 1;
    if (state.unskipped < growth_interval) return;
    state.unskipped = 0;
    // A scale above the maximum was set by hand: growth does not lower it.
    const float ceiling = state.scale > max_scale ? state.scale : max_scale;
    float higher = static_cast<float>(state.scale * growth_factor);
    higher = higher < ceiling ? higher : ceiling;
    if (higher <= 3.402823466e38f) state.scale = higher;
  }
};

}  // namespace ampkit
