// The rule of a dynamic loss scale, as DynamicScaler has it (ampkit/iteration/loss_scale.py). Products are float64, rounded once.
#pragma once

#include <cstdint>

#include "functors/macros.h"

namespace ampkit {

struct UpdateScaleFunctor {
  double growth_factor, backoff_factor;
  int64_t growth_interval, hysteresis;
  float min_scale, max_scale;

  AMPKIT_INLINE void operator()(float& scale, int32_t& growth_tracker, int32_t& hysteresis_tracker, float found_inf) const {
    if (found_inf != 0.0f) {
      growth_tracker = 0;
      hysteresis_tracker -= 1;
      if (hysteresis_tracker > 0) return;
      const float lower = static_cast<float>(scale * backoff_factor);
      scale = lower < min_scale ? min_scale : lower;
      return;
    }
    hysteresis_tracker = static_cast<int32_t>(hysteresis);
    growth_tracker += 1;
    if (growth_tracker < growth_interval) return;
    growth_tracker = 0;
    // A scale above the maximum was set by hand: growth does not lower it.
    const float ceiling = scale > max_scale ? scale : max_scale;
    float higher = static_cast<float>(scale * growth_factor);
    higher = higher < ceiling ? higher : ceiling;
    if (higher <= 3.402823466e38f) scale = higher;
  }
};

}  // namespace ampkit
