// What the steps of all optimizers share. A step's functor is made from settings, once a call (on CUDA: once a block,
// because rates, scales and step counts may lie on the device), and then updates one element at a time:
//
//   void operator()(float gradient, float& param, float& state, float& second_state, float each) const
//
// kTakesRests says that the op takes weights with rests (functors/split.h). Without fused multiply-adds (see
// multi_tensor_axpby.h), so the result is the same on every device.
#pragma once

#include <math.h>

#include "functors/number.h"

namespace ampkit {

struct StepSettings {
  Number lr;
  float factor;            // of the gradients, times these two
  const float* inv_scale;  // may be nullptr, like the other two
  const float* clip;
  const float* found_inf;

  AMPKIT_INLINE bool skips() const { return found_inf != nullptr && *found_inf != 0.0f; }

  AMPKIT_INLINE float gradient_factor() const {
    float product = factor;
    if (inv_scale != nullptr) product *= *inv_scale;
    if (clip != nullptr) product *= *clip;
    return product;
  }
};

// What a running mean falls short of after so many steps; in float64, for the power comes close to 1.
AMPKIT_INLINE double bias_correction(double beta, double step) { return 1.0 - pow(beta, step); }

}  // namespace ampkit
