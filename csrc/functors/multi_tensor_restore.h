// out = factor * (rounded(exact * inv_scale) is grad ? exact * inv_scale : grad): what was known before rounding, wherever
// nobody has written since. A NaN is never equal and stays. With zeros_count, a zero was written by somebody.
//
// Note [runs]: an average over processes rounds, here and there, to what stood there before on one of them. Taken for
// untouched, that element would be given the exact value of its own process, and the processes would part. So where more than
// one of eight elements in a row was changed, all eight were written.
#pragma once

#include "functors/number.h"

namespace ampkit {

constexpr int kRestoreRun = 8;

struct RestoreFunctor {
  float inv_scale;
  float factor;
  bool zeros_count;

  AMPKIT_INLINE RestoreFunctor(Number inv_scale, Number factor, bool zeros_count)
      : inv_scale(static_cast<float>(inv_scale.get())), factor(static_cast<float>(factor.get())), zeros_count(zeros_count) {}

  AMPKIT_INLINE float unscaled(float exact) const { return exact * inv_scale; }

  // rounded: unscaled(exact), as the gradient's dtype holds it. changes: in how many elements of its run they differ.
  AMPKIT_INLINE float operator()(float grad, float exact, float rounded, int changes) const {
    const bool stays = (grad == rounded) & (changes < 2) & !(zeros_count & (grad == 0.0f));
    return (stays ? unscaled(exact) : grad) * factor;
  }
};

}  // namespace ampkit
