// LAMB: the moments and the direction u of Adam (multi_tensor_adam.h), then p = p - lr * u * ratio. The ratio of a
// tensor is |p| / |u|, or 1 if one of them is 0.
//
// Two passes: the first one updates the moments and sums squares, the second one computes the directions again instead of
// storing them: reading the moments again costs no more, and needs no memory.
#pragma once

#include "functors/multi_tensor_adam.h"

namespace ampkit {

// The first pass. Writes the direction in place of the parameter, which is not stored.
struct LambFunctor : AdamFunctor {
  static constexpr const char* kRule = "lamb";
  static constexpr bool kTakesRests = false, kSumsSquares = true;

  using AdamFunctor::AdamFunctor;
  AMPKIT_INLINE void operator()(float g, float& p, float& m, float& v, float) const {
    update_moments(g, p, m, v);
    p = direction(p, m, v);
  }
};

struct LambMoveFunctor : AdamFunctor {
  static constexpr bool kTakesRests = false, kKeepsStates = true;

  using AdamFunctor::AdamFunctor;
  AMPKIT_INLINE void operator()(float, float& p, float& m, float& v, float ratio) const { p = p - lr * (direction(p, m, v) * ratio); }
};

AMPKIT_INLINE float lamb_ratio(double squares_of_params, double squares_of_directions) {
  if (!(squares_of_params > 0) || !(squares_of_directions > 0)) return 1.0f;
  return static_cast<float>(sqrt(squares_of_params) / sqrt(squares_of_directions));
}

}  // namespace ampkit
