// The finite check, as a maximum over the bits: without their sign, float32 bit patterns order like the magnitudes
// they stand for, with infinity and the NaNs above all finite numbers. An integer maximum vectorises where a
// floating point classification does not, and one comparison at the end of a block settles it.
#pragma once

#include <cstdint>
#include <cstring>

#include "functors/macros.h"

namespace ampkit {

constexpr int32_t kInfinityBits = 0x7f800000;

AMPKIT_INLINE int32_t magnitude_bits(float x) {
  int32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits & 0x7fffffff;
}

}  // namespace ampkit
