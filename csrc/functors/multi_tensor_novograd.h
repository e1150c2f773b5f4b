// NovoGrad, with the running norm of each tensor's gradients already moved:
//   n = norm / sqrt(c2) + eps,  c = 1 - beta^step
//   inside the moment:  m = beta1 * m + share * (d / n + weight_decay * p),  p = p - lr * m / c1
//   outside:            m = beta1 * m + share * d,                           p = p - lr * (m / c1 / n + weight_decay * p)
#pragma once

#include "functors/multi_tensor_step.h"

namespace ampkit {

struct NovogradSettings {
  StepSettings common;
  Number step;
  double beta1, beta2, eps, weight_decay;
  double share;  // of the gradient in the first moment
  bool inside_moment, corrects_bias;
};

struct NovogradFunctor {
  using Settings = NovogradSettings;
  static constexpr int kStates = 1;
  static constexpr bool kTakesRests = false;

  float factor, beta1, share, inverse1, inverse2, eps, decay_inside, decay_outside, lr;
  bool inside_moment;

  NovogradFunctor() = default;
  AMPKIT_INLINE explicit NovogradFunctor(const NovogradSettings& settings) {
    const double step = settings.corrects_bias ? settings.step.get() : 1.0;
    factor = settings.common.gradient_factor();
    beta1 = static_cast<float>(settings.beta1);
    share = static_cast<float>(settings.share);
    inverse1 = settings.corrects_bias ? static_cast<float>(1.0 / bias_correction(settings.beta1, step)) : 1.0f;
    inverse2 = settings.corrects_bias ? static_cast<float>(1.0 / sqrt(bias_correction(settings.beta2, step))) : 1.0f;
    eps = static_cast<float>(settings.eps);
    inside_moment = settings.inside_moment;
    decay_inside = inside_moment ? static_cast<float>(settings.weight_decay) : 0.0f;
    decay_outside = inside_moment ? 0.0f : static_cast<float>(settings.weight_decay);
    lr = static_cast<float>(settings.common.lr.get());
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
