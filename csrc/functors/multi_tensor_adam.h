// Adam and AdamW:
//   d = g * factor (+ weight_decay * p, if not decoupled)
//   m = beta1 * m + share * d,  v = beta2 * v + (1 - beta2) * d * d
//   p = p - lr * (m / c1 / (sqrt(v / c2) + eps) (+ weight_decay * p, if decoupled)),  c = 1 - beta^step
#pragma once

#include "functors/multi_tensor_step.h"

namespace ampkit {

struct AdamSettings {
  StepSettings common;
  Number step;
  double beta1, beta2, eps, weight_decay;
  double share;  // of the gradient in the first moment
  bool decoupled, corrects_bias;
};

struct AdamFunctor {
  using Settings = AdamSettings;
  static constexpr int kStates = 2;
  static constexpr bool kTakesRests = true;

  float factor, beta1, share, beta2, rest2, inverse1, inverse2, eps, decay_of_gradient, decay, lr;

  AdamFunctor() = default;
  AMPKIT_INLINE explicit AdamFunctor(const AdamSettings& settings) {
    const double step = settings.corrects_bias ? settings.step.get() : 1.0;
    factor = settings.common.gradient_factor();
    beta1 = static_cast<float>(settings.beta1);
    share = static_cast<float>(settings.share);
    beta2 = static_cast<float>(settings.beta2);
    rest2 = static_cast<float>(1.0 - settings.beta2);
    inverse1 = settings.corrects_bias ? static_cast<float>(1.0 / bias_correction(settings.beta1, step)) : 1.0f;
    inverse2 = settings.corrects_bias ? static_cast<float>(1.0 / sqrt(bias_correction(settings.beta2, step))) : 1.0f;
    eps = static_cast<float>(settings.eps);
    decay_of_gradient = settings.decoupled ? 0.0f : static_cast<float>(settings.weight_decay);
    decay = settings.decoupled ? static_cast<float>(settings.weight_decay) : 0.0f;
    lr = static_cast<float>(settings.common.lr.get());
  }

  AMPKIT_INLINE float each(float value) const { return value; }

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
