// Stochastic gradient descent:
//   d = (g * factor + decay_before * p) * trust
//   m = d on the first run, momentum * m + (1 - dampening) * d later
//   p = p - lr * ((d + momentum * m if nesterov, else m) + decay_after * p)
// Without momentum there is no m, and d takes its place.
#pragma once

#include "functors/multi_tensor_step.h"

namespace ampkit {

template <bool kMomentum>
struct SgdFunctor : Rule {
  using Settings = StepSettings<6>;
  static constexpr const char* kRule = kMomentum ? "sgd with momentum" : "sgd";
  static constexpr int kStates = kMomentum ? 1 : 0;
  static constexpr bool kTakesRests = true;

  float factor, momentum, share, of_gradient, of_momentum, decay_before, decay_after, lr;
  bool first_run;

  SgdFunctor() = default;
  AMPKIT_INLINE explicit SgdFunctor(const Settings& settings) {
    const auto& [momentum_, dampening, weight_decay, nesterov, is_first, decays_after] = settings.own;
    factor = settings.gradient_factor();
    momentum = static_cast<float>(momentum_);
    share = static_cast<float>(1.0 - dampening);
    of_gradient = nesterov ? 1.0f : 0.0f;
    of_momentum = nesterov ? momentum : 1.0f;
    decay_before = decays_after ? 0.0f : static_cast<float>(weight_decay);
    decay_after = decays_after ? static_cast<float>(weight_decay) : 0.0f;
    lr = static_cast<float>(settings.lr.get());
    first_run = is_first != 0;
  }

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
