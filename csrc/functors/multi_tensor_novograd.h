// NovoGrad, with the running norm of each tensor's gradients already updated:
//   n = norm / sqrt(c2) + eps,  c = 1 - beta^step
//   inside the moment:  m = beta1 * m + share * (d / n + weight_decay * p),  p = p - lr * m / c1
//   outside:            m = beta1 * m + share * d,                           p = p - lr * (m / c1 / n + weight_decay * p)
#pragma once

#include "functors/multi_tensor_step.h"

namespace ampkit {

struct NovogradFunctor : Rule {
  using Settings = StepSettings<7>;
  static constexpr const char* kRule = "novograd";
  static constexpr int kStates = 1;

  float factor, beta1, share, inverse1, inverse2, eps, decay_inside, decay_outside, lr;
  bool inside_moment;

  NovogradFunctor() = default;
  AMPKIT_INLINE explicit NovogradFunctor(const Settings& settings) {
    const auto& [beta1_, beta2_, share_, eps_, weight_decay, is_inside, corrects_bias] = settings.own;
    factor = settings.gradient_factor();
    beta1 = static_cast<float>(beta1_);
    share = static_cast<float>(share_);
    inverse1 = corrects_bias ? static_cast<float>(1.0 / settings.bias_correction(0)) : 1.0f;
    inverse2 = corrects_bias ? static_cast<float>(1.0 / sqrt(settings.bias_correction(1))) : 1.0f;
    eps = static_cast<float>(eps_);
    inside_moment = is_inside != 0;
    decay_inside = inside_moment ? static_cast<float>(weight_decay) : 0.0f;
    decay_outside = inside_moment ? 0.0f : static_cast<float>(weight_decay);
    lr = static_cast<float>(settings.lr.get());
  }

  AMPKIT_INLINE float each(float norm) const { return norm * inverse2 + eps; }

  AMPKIT_INLINE void operator()(float g, float& p, float& m, float&, float denominator) const {
    const float d = g * factor;
    const float before = inside_moment ? denominator : 1.0f;
    const float after = inside_moment ? 1.0f : denominator;
    m = beta1 * m + share * (d / before + decay_inside * p);
    p = p - lr * (m * inverse1 / after + decay_outside * p);
  }
};

}  // namespace ampkit
