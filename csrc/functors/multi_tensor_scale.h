// out = x * scale: one float32 product, rounded once more if the output is narrower.
#pragma once

#include "functors/number.h"

namespace ampkit {

struct ScaleFunctor {
  float scale;

  AMPKIT_INLINE explicit ScaleFunctor(Number scale) : scale(static_cast<float>(scale.get())) {}
  AMPKIT_INLINE float operator()(float x) const { return x * scale; }
};

}  // namespace ampkit
