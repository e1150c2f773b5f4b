// out = x * scale: one float32 product, rounded once more if the output is narrower.
#pragma once

#include "functors/number.h"

namespace ampkit {

struct ScaleFunctor {
  float scale;

  AMPKIT_INLINE explicit ScaleFunctor(Number scale) : scale(static_cast<float>(scale.get())) {}
  template <class Floats>  // one, or a vector of them
  AMPKIT_INLINE Floats operator()(Floats x) const {
    return x * scale;
  }
};

}  // namespace ampkit
