// Stochastic gradient descent:
//   d = (g * factor + decay_before * p) * trust
//   m = d on the first run, momentum * m + (1 - dampening) * d later
//   p = p - lr * ((d + momentum * m if nesterov, else m) + decay_after * p)
// Without momentum there is no m, and d takes its place.
#pragma once

#include "functors/multi_tensor_step.h"

namespace ampkit {

struct SgdSettings {
  StepSettings common;
  double momentum, dampening, weight_decay;
  bool nesterov, first_run, decay_after_momentum;
};

template <bool kMomentum>
struct SgdFunctor {
  using Settings = SgdSettings;
  static constexpr int kStates = kMomentum ? 1 : 0;
  static constexpr bool kTakesRests = true;

  float factor, momentum, share, of_gradient, of_momentum, decay_before, decay_after, lr;
  bool first_run;

  SgdFunctor() = default;
  AMPKIT_INLINE explicit SgdFunctor(const SgdSettings& settings) {
    const float decay = static_cast<float>(settings.weight_decay);
    factor = settings.common.gradient_factor();
    momentum = static_cast<float>(settings.momentum);
    share = static_cast<float>(1.0 - settings.dampening);
    of_gradient = settings.nesterov ? 1.0f : 0.0f;
    of_momentum = settings.nesterov ? momentum : 1.0f;
    decay_before = settings.decay_after_momentum ? 0.0f : decay;
    decay_after = settings.decay_after_momentum ? decay : 0.0f;
    lr = static_cast<float>(settings.common.lr.get());
    first_run = settings.first_run;
  }

  AMPKIT_INLINE float each(float trust) const { return trust; }

  AMPKIT_INLINE void operator()(float g, float& p, float& m, float&, float trust) const {
    const float d = (g * factor + decay_before * p) * trust;
    float update = d;
    if (kMomentum) {
      const float later = momentum * m + share * d;
      m = first_run ? d : later;
      update = of_gradient * d + of_momentum * m;
    }
    p = p - lr * (update + decay_after * p);
  }
};

}  // namespace ampkit
