// out = factor * (rounded(exact * inv_scale) is grad ? exact * inv_scale : grad): what was known before rounding, wherever
// nobody has written since. A NaN is never equal and stays. With zeros_count, a zero was written by somebody.
#pragma once

#include "functors/number.h"

namespace ampkit {

struct RestoreFunctor {
  float inv_scale;
  float factor;
  bool zeros_count;

  AMPKIT_INLINE RestoreFunctor(Number inv_scale, Number factor, bool zeros_count)
      : inv_scale(static_cast<float>(inv_scale.get())), factor(static_cast<float>(factor.get())), zeros_count(zeros_count) {}

  AMPKIT_INLINE float unscaled(float exact) const { return exact * inv_scale; }

  // rounded: unscaled(exact), as the gradient's dtype holds it.
  AMPKIT_INLINE float operator()(float grad, float exact, float rounded) const {
    const bool stays = (grad == rounded) & !(zeros_count & (grad == 0.0f));
    return (stays ? unscaled(exact) : grad) * factor;
  }
};

}  // namespace ampkit
