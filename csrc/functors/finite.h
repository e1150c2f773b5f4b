// The finite check, as a maximum over the bits: without their sign, float32 bit patterns order like the magnitudes
// that they represent, with infinity and the NaNs above all finite numbers. An integer maximum vectorises, unlike a
// floating point classification, and one comparison at the end of a block decides.
#pragma once

#include <cstdint>
#include <cstring>

#include "functors/macros.h"

namespace ampkit {

constexpr int32_t kInfinityBits = 0x7f800000;

AMPKIT_INLINE int32_t float_bits(float value) {
  int32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

AMPKIT_INLINE float float_of_bits(int32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

AMPKIT_INLINE int32_t magnitude_bits(float x) { return float_bits(x) & 0x7fffffff; }

}  // namespace ampkit
