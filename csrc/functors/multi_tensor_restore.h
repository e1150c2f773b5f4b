// out = factor * (rounded(exact * inv_scale) is grad ? exact * inv_scale : grad): what was known before rounding, wherever
// nobody has written since. A NaN is never equal and stays. With zeros_count, a zero was written by somebody.
//
// Note [runs]: an average over processes rounds, here and there, to what stood there before on one of them. Taken for
// untouched, that element would be given the exact value of its own process, and the processes would part. So where more than
// one of eight elements in a row was changed, all eight were written.
#pragma once

#include <cstdint>

#include "functors/number.h"

namespace ampkit {

constexpr int kRestoreRun = 8;

struct RestoreFunctor {
  float inv_scale;
  float factor;
  bool zeros_count;

  AMPKIT_INLINE RestoreFunctor(Number inv_scale, Number factor, bool zeros_count)
      : inv_scale(static_cast<float>(inv_scale.get())), factor(static_cast<float>(factor.get())), zeros_count(zeros_count) {}

  template <class Floats>  // one, or a vector of them
  AMPKIT_INLINE Floats unscaled(Floats exact) const {
    return exact * inv_scale;
  }

  // Which elements of a run were written to, bit k for element k, where changed are those that differ from what was rounded.
  AMPKIT_INLINE static uint32_t written(uint32_t changed) {
    const bool several = (changed & (changed - 1)) != 0;
    return several ? (1u << kRestoreRun) - 1 : changed;
  }

  AMPKIT_INLINE float operator()(float grad, float exact, bool is_written) const {
    return (is_written | (zeros_count & (grad == 0.0f)) ? grad : unscaled(exact)) * factor;
  }
};

}  // namespace ampkit
