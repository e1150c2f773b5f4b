// x * x in float64, where the square of a float32 is exact and cannot overflow: sums of a hundred million of them keep
// their digits (a float32 sum of that length is off by a percent), and no rescan for huge values is needed.
#pragma once

#include "functors/macros.h"

namespace ampkit {

struct SquareFunctor {
  AMPKIT_INLINE double operator()(float x) const {
    const double wide = x;
    return wide * wide;
  }
};

}  // namespace ampkit
