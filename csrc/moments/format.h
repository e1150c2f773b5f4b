// Moments in 8 bits, in blocks of kMomentBlock elements; ampkit/kernels/moments.py explains the format and its error.
//
// A value is rounded to a float of 8 bits of exponent and kMantissa of mantissa: its place on the grid, a whole number. A block
// stores the highest place of its elements, and for each element its distance below that: all in
// whole numbers, so that every device and instruction set finds the same bits.
#pragma once

#include <cstdint>

#include "functors/macros.h"

namespace ampkit {

constexpr int kMomentBlock = 256;
constexpr int kMantissa = 3, kDropped = 23 - kMantissa;
constexpr uint32_t kHalfPlace = 1u << (kDropped - 1);
constexpr uint32_t kInfinitePlace = 0x7f800000u >> kDropped, kNanPlace = 0x7fc00000u >> kDropped;

// The bytes of the codes of numel elements; the blocks' places follow these.
AMPKIT_INLINE int64_t code_bytes(int64_t numel) { return (numel + 3) / 4 * 4; }
AMPKIT_INLINE int64_t packed_bytes(int64_t numel) {
  return code_bytes(numel) + (numel + kMomentBlock - 1) / kMomentBlock * 4;
}

// Added before bits are dropped: half of their range rounds to nearest; a number drawn from the range rounds up as often as
// the value is close to the upper neighbour. A value on the grid does not change.
constexpr uint32_t kDitherMask = (1u << kDropped) - 1;
AMPKIT_INLINE uint32_t place_dither(uint32_t drawn) { return drawn & kDitherMask; }

AMPKIT_INLINE uint32_t place_of(uint32_t magnitude, uint32_t dither) {
  const uint32_t rounded = (magnitude + dither) >> kDropped;
  const uint32_t finite = rounded < kInfinitePlace ? rounded : kInfinitePlace - 1;
  const uint32_t other = magnitude > 0x7f800000u ? kNanPlace : kInfinitePlace;
  return magnitude < 0x7f800000u ? finite : other;
}

// A first moment: a sign, and 127 places, of which the lowest is 2^-15.75 of the highest; lower values become 0.
struct SignedCode {
  static constexpr bool kSigned = true;
  static constexpr uint32_t kHighest = 127;

  static AMPKIT_INLINE uint32_t place(uint32_t bits, uint32_t dither) { return place_of(bits & 0x7fffffffu, dither); }
  static AMPKIT_INLINE uint32_t encode(uint32_t bits, uint32_t place, uint32_t base) {
    return (place > base ? place - base : 0) | (bits >> 24 & 0x80u);
  }
  static AMPKIT_INLINE uint32_t decode(uint32_t code, uint32_t base) {
    const uint32_t low = code & 0x7fu;
    return (low == 0 ? 0 : (low + base) << kDropped) | (code & 0x80u) << 24;
  }
};

// A second moment, a divisor: 255 places, of which the lowest is 2^-31.75 of the highest. Lower values are
// raised to it: only zeros become 0.
struct UnsignedCode {
  static constexpr bool kSigned = false;
  static constexpr uint32_t kHighest = 255;

  static AMPKIT_INLINE uint32_t place(uint32_t bits, uint32_t dither) {
    const uint32_t magnitude = bits & 0x7fffffffu, found = place_of(magnitude, dither);
    return magnitude != 0 && found == 0 ? 1 : found;
  }
  static AMPKIT_INLINE uint32_t encode(uint32_t bits, uint32_t place, uint32_t base) {
    const uint32_t raised = place > base ? place - base : 1;
    return (bits & 0x7fffffffu) == 0 ? 0 : raised;
  }
  static AMPKIT_INLINE uint32_t decode(uint32_t code, uint32_t base) { return code == 0 ? 0 : (code + base) << kDropped; }
};

// The place from which codes count, in a block with this highest place.
template <class Code>
AMPKIT_INLINE uint32_t base_of(uint32_t highest) {
  return highest > Code::kHighest ? highest - Code::kHighest : 0;
}

// bfloat16, rounded by a number drawn: the upper neighbour as often as the value is close to it. Finite values stay finite.
AMPKIT_INLINE uint32_t drawn_bfloat16(uint32_t bits, uint32_t drawn) {
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t rounded = (magnitude + (drawn & 0xffffu)) >> 16;
  const uint32_t finite = rounded < 0x7f80u ? rounded : 0x7f7fu;
  const uint32_t other = magnitude > 0x7f800000u ? 0x7fc0u : 0x7f80u;
  return (magnitude < 0x7f800000u ? finite : other) | (bits >> 16 & 0x8000u);
}

}  // namespace ampkit
