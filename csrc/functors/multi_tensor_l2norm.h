// Sums of squares that keep their digits. A float32 sum of a hundred million squares is off by a percent, and squares of
// float32 numbers may leave its range.
//
// In float64 the square of a float32 is exact and cannot overflow, but it halves the speed of a CPU and is slow on many GPUs.
// So a float32 sum runs over at most 4096 squares in 64 lanes, on CUDA over 8, and is taken again in float64 unless it is_safe().
#pragma once

#include "functors/macros.h"

namespace ampkit {

struct SquareFunctor {
  AMPKIT_INLINE double operator()(float x) const {
    const double wide = x;
    return wide * wide;
  }
};

struct SumOfSquares {
  double sum;
  bool finite;  // whether all squared values are
};

// Whether a float32 sum of at most 4096 squares has neither overflowed (then it is inf or NaN) nor lost relevant
// digits: squares below 2^-126 are off by at most 2^-150 each.
AMPKIT_INLINE bool is_safe(float sum) { return sum > 1e-27f && sum < 1e38f; }

}  // namespace ampkit
