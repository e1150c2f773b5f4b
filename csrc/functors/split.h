// Note [split parameters]: a float32 parameter kept in two tensors, the bfloat16 weight that the model computes with and the
// rest of its bits.
//
// The weight is the parameter rounded to nearest, ties away from zero. Then the rest is the lower half of the float32 itself,
// read as a signed int16: adding it to the weight's bits takes the rounding back, carries included. A rest in int8 is the
// upper half of that, and the parameter is rounded to 24 bits first, likewise. A NaN becomes the canonical one.
//
// Whatever stands in the weight, the two together round to it again. A zero that somebody wrote over a weight whose rest is
// negative stays a zero: bits below it would be those of a NaN.
#pragma once

#include <cstdint>
#include <cstring>

#include "functors/macros.h"

namespace ampkit {

// How many bits of a float32 are left out.
template <class Rest>
constexpr int kLeftOut = 16 - 8 * static_cast<int>(sizeof(Rest));

template <class Rest>
AMPKIT_INLINE float join(uint32_t weight, Rest rest) {
  const int32_t sum = static_cast<int32_t>((weight & 0x7fffu) << 16) + static_cast<int32_t>(rest) * (1 << kLeftOut<Rest>);
  const int32_t magnitude = sum < 0 ? 0 : sum;
  const uint32_t bits = static_cast<uint32_t>(magnitude) | (weight & 0x8000u) << 16;
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

template <class Rest>
AMPKIT_INLINE void split(float value, uint16_t& weight, Rest& rest) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  bits = is_nan ? 0x7fc00000u : bits + ((1u << kLeftOut<Rest>) >> 1);
  weight = static_cast<uint16_t>((bits + 0x8000u) >> 16);
  rest = static_cast<Rest>(bits >> kLeftOut<Rest>);
}

}  // namespace ampkit
