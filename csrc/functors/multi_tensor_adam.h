// Adam and AdamW:
//   d = g * factor (+ weight_decay * p, if not decoupled)
//   m = beta1 * m + share * d,  v = beta2 * v + (1 - beta2) * d * d
//   p = p - lr * (m / c1 / (sqrt(v / c2) + eps) (+ weight_decay * p, if decoupled)),  c = 1 - beta^step
#pragma once

#include "functors/multi_tensor_step.h"

namespace ampkit {

struct AdamFunctor : Rule {
  using Settings = StepSettings<7>;
  static constexpr const char* kRule = "adam";
  static constexpr int kStates = 2;
  static constexpr bool kTakesRests = true;

  float factor, beta1, share, beta2, rest2, inverse1, inverse2, eps, decay_of_gradient, decay, lr;

  AdamFunctor() = default;
  AMPKIT_INLINE explicit AdamFunctor(const Settings& settings) {
    const auto& [beta1_, beta2_, share_, eps_, weight_decay, decoupled, corrects_bias] = settings.own;
    factor = settings.gradient_factor();
    beta1 = static_cast<float>(beta1_);
    share = static_cast<float>(share_);
    beta2 = static_cast<float>(beta2_);
    rest2 = static_cast<float>(1.0 - beta2_);
    inverse1 = corrects_bias ? static_cast<float>(1.0 / settings.bias_correction(0)) : 1.0f;
    inverse2 = corrects_bias ? static_cast<float>(1.0 / sqrt(settings.bias_correction(1))) : 1.0f;
    eps = static_cast<float>(eps_);
    decay_of_gradient = decoupled ? 0.0f : static_cast<float>(weight_decay);
    decay = decoupled ? static_cast<float>(weight_decay) : 0.0f;
    lr = static_cast<float>(settings.lr.get());
  }

  AMPKIT_INLINE void update_moments(float g, float p, float& m, float& v) const {
    const float d = g * factor + decay_of_gradient * p;
    m = beta1 * m + share * d;
    v = beta2 * v + rest2 * d * d;
  }

  AMPKIT_INLINE float direction(float p, float m, float v) const {
    return m * inverse1 / (AMPKIT_SQRT(v) * inverse2 + eps) + decay * p;
  }

  AMPKIT_INLINE void operator()(float g, float& p, float& m, float& v, float) const {
    update_moments(g, p, m, v);
    p = p - lr * direction(p, m, v);
  }
};

}  // namespace ampkit
