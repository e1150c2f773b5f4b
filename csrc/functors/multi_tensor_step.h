// What the steps of all optimizers share. A step's functor is made from settings, once a call (on CUDA: once a block,
// because rates, scales and step counts may lie on the device), and then updates one element at a time:
//
//   void operator()(float gradient, float& param, float& state, float& second_state, float each) const
//
// kTakesRests says that the rule takes weights with rests (functors/split.h) and packed moments (functors/moments.h), and rounds by
// numbers drawn (functors/rounding.h). Without fused multiply-adds (see multi_tensor_axpby.h), so the result is the same on every
// device.
#pragma once

#include <math.h>

#include "functors/number.h"

namespace ampkit {

// own: the settings of the rule, in the order in which reference_optimizers.py gives them. Flags are 0 or 1.
template <int kCount_>
struct StepSettings {
  static constexpr int kCount = kCount_;

  Number lr, step;
  float factor;            // of the gradients, times these two
  const float* inv_scale;  // may be nullptr, like the other two
  const float* clip;
  const float* found_inf;
  double own[kCount];

  AMPKIT_INLINE bool skips() const { return found_inf != nullptr && *found_inf != 0.0f; }

  AMPKIT_INLINE float gradient_factor() const {
    float product = factor;
    if (inv_scale != nullptr) product *= *inv_scale;
    if (clip != nullptr) product *= *clip;
    return product;
  }

  // What a running mean falls short of after so many steps; in float64, for the power comes close to 1.
  AMPKIT_INLINE double bias_correction(double beta) const { return 1.0 - pow(beta, step.get()); }
};

}  // namespace ampkit
