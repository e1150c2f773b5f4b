// The rounding of optimizer steps that do not round to nearest.
#pragma once

#include "functors/number.h"
#include "moments/philox.h"

namespace ampkit {

// The numbers drawn for an element: one for its moments, each of which is right in the mean, and one for itself.
constexpr uint32_t kMoments = 0, kParam = 1;

struct Rounding {
  const float* positions;  // of each parameter among all of the optimizer's; nullptr: everything is rounded to nearest
  Number step;
  uint64_t seed;
  bool params;  // whether parameters are rounded by numbers drawn, like the moments

  AMPKIT_INLINE bool draws() const { return positions != nullptr; }
  AMPKIT_INLINE Philox numbers_of(int64_t tensor) const {
    return {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), static_cast<uint32_t>(step.get()),
            static_cast<uint32_t>(positions[tensor])};
  }
};

}  // namespace ampkit
