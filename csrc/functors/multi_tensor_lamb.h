// LAMB: the moments and the direction u of Adam (multi_tensor_adam.h), then p = p - lr * u * ratio, where the ratio of a
// tensor is |p| / |u|, or 1 where one of them is 0. It has a driver of its own on each device.
#pragma once

#include "functors/multi_tensor_adam.h"

namespace ampkit {

struct LambFunctor : AdamFunctor {
  static constexpr const char* kRule = "lamb";
  static constexpr bool kTakesRests = false;

  using AdamFunctor::AdamFunctor;
};

AMPKIT_INLINE float lamb_ratio(double squares_of_params, double squares_of_directions) {
  if (!(squares_of_params > 0) || !(squares_of_directions > 0)) return 1.0f;
  return static_cast<float>(sqrt(squares_of_params) / sqrt(squares_of_directions));
}

}  // namespace ampkit
