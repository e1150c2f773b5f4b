// How the steps of optimizers round what they write where they do not round to nearest.
#pragma once

#include "functors/number.h"
#include "moments/philox.h"

namespace ampkit {

// What is drawn for an element: one number for its moments, of which each is right in the mean, and one for itself.
constexpr uint32_t kMoments = 0, kParam = 1;

struct Rounding {
  const float* positions;  // of each parameter among all of the optimizer's; nullptr: everything is rounded to nearest
  Number step;
  uint64_t seed;
  bool params;  // whether these are rounded by numbers drawn, as the moments are

  AMPKIT_INLINE bool draws() const { return positions != nullptr; }
  AMPKIT_INLINE Philox numbers_of(int64_t tensor) const {
    return {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), static_cast<uint32_t>(step.get()),
            static_cast<uint32_t>(positions[tensor])};
  }
};

}  // namespace ampkit
