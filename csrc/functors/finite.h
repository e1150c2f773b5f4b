// The finite check, as a maximum over the bits: without their sign, float32 bit patterns order like the magnitudes
// that they represent, with infinity and the NaNs above all finite numbers. An integer maximum vectorises, unlike a
// floating point classification, and one comparison at the end of a block decides.
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
