// out = a * x + b * y in float32: two products, each rounded, then their sum. Compilers are told not to contract this
// into a fused multiply-add, so that every device and the reference agree bit for bit.
#pragma once

#include "functors/number.h"

namespace ampkit {

struct AxpbyFunctor {
  float a;
  float b;

  AMPKIT_INLINE AxpbyFunctor(Number a, Number b) : a(static_cast<float>(a.get())), b(static_cast<float>(b.get())) {}

  AMPKIT_INLINE float operator()(float x, float y) const {
    const float ax = a * x;
    const float by = b * y;
    return ax + by;
  }
};

}  // namespace ampkit
