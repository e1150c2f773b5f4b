// Adagrad:
//   d = g * factor (+ weight_decay * p, if not decoupled),  h = h + d * d
//   p = p - lr * (d / (sqrt(h) + eps) (+ weight_decay * p, if decoupled))
#pragma once

#include "functors/multi_tensor_step.h"

namespace ampkit {

struct AdagradFunctor : Rule {
  using Settings = StepSettings<3>;
  static constexpr const char* kRule = "adagrad";
  static constexpr int kStates = 1;

  float factor, eps, decay_of_gradient, decay, lr;

  AdagradFunctor() = default;
  AMPKIT_INLINE explicit AdagradFunctor(const Settings& settings) {
    const auto& [eps_, weight_decay, decoupled] = settings.own;
    factor = settings.gradient_factor();
    eps = static_cast<float>(eps_);
    decay_of_gradient = decoupled ? 0.0f : static_cast<float>(weight_decay);
    decay = decoupled ? static_cast<float>(weight_decay) : 0.0f;
    lr = static_cast<float>(settings.lr.get());
  }

  AMPKIT_INLINE void operator()(float g, float& p, float& h, float&, float) const {
    const float d = g * factor + decay_of_gradient * p;
    h = h + d * d;
    p = p - lr * (d / (AMPKIT_SQRT(h) + eps) + decay * p);
  }
};

}  // namespace ampkit
