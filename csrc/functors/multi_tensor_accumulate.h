// total = fresh * inv_scale + what functors/multi_tensor_restore.h gives of the gradient: the product is rounded, then the sum.
#pragma once

#include "functors/multi_tensor_restore.h"

namespace ampkit {

struct AccumulateFunctor {
  RestoreFunctor restore;
  float inv_scale;

  AMPKIT_INLINE AccumulateFunctor(Number inv_scale, Number exact_inv_scale, bool zeros_count)
      : restore(exact_inv_scale, {1.0, nullptr}, zeros_count), inv_scale(static_cast<float>(inv_scale.get())) {}

  template <class Floats>  // one, or a vector of them
  AMPKIT_INLINE Floats operator()(Floats fresh, Floats restored) const {
    const Floats unscaled = fresh * inv_scale;
    return unscaled + restored;
  }
};

}  // namespace ampkit
