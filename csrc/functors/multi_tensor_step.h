// Code that the steps of all optimizers share. A step's functor is made from settings, once a call (on CUDA: once a block,
// because learning rates, scales and step counts may lie on the device), and then updates one element at a time:
//
//   void operator()(float gradient, float& param, float& state, float& second_state, float each) const
//
// There are no fused multiply-adds (see multi_tensor_axpby.h), so the result is the same on every device.
#pragma once

#include <math.h>

#include "functors/number.h"

namespace ampkit {

// The defaults of a rule, which its functor overrides.
struct Rule {
  // It takes weights with rests (functors/split.h) and packed moments (moments/format.h), and rounds by numbers drawn.
  static constexpr bool kTakesRests = false;
  // It writes a direction in place of the parameter: only states are stored, and squares of both are summed.
  static constexpr bool kSumsSquares = false;
  static constexpr bool kKeepsStates = false;  // it only reads them

  AMPKIT_INLINE float each(float value) const { return value; }
};

// own: the settings of the rule, in the order in which its function in Python passes them; betas are first. Flags are 0 or 1.
template <int kCount_>
struct StepSettings {
  static constexpr int kCount = kCount_;

  Number lr, step;
  float factor;            // of the gradients, times these two
  const float* inv_scale;  // may be nullptr, like the other two
  const float* clip;
  const float* found_inf;
  double own[kCount];
  double log_betas[2];  // logarithms of the first two, computed on the host: powers take a GPU's thread hundreds of instructions

  AMPKIT_INLINE bool skips() const { return found_inf != nullptr && *found_inf != 0.0f; }

  AMPKIT_INLINE float gradient_factor() const {
    float product = factor;
    if (inv_scale != nullptr) product *= *inv_scale;
    if (clip != nullptr) product *= *clip;
    return product;
  }

  // 1 - beta^step, the sum of a running mean's weights after this many steps; in float64, because the power is close to 1.
  AMPKIT_INLINE double bias_correction(int beta) const { return -expm1(step.get() * log_betas[beta]); }
};

}  // namespace ampkit
