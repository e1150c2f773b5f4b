// Note [weights and rests]: a float32 value kept in two tensors, the 16-bit weight that the model computes with and an int16 rest.
//
// Both dtypes have codes that grow with the magnitude, in such steps that the upper bits of a code are the weight:
//   bfloat16  the bits of the float32 itself; the rest is the lower 16 of them
//   float16   the weight's bits and 15 more, that is, units of 2^-15 of the last place: from 2^-14 to 65504 every float32 has a
//             code, below it is rounded to 2^-39
// The weight is the value rounded to nearest, ties away from zero. The rest is the value's code minus the weight's.
//
// Whatever a script writes to the weight, the two together still round to it, and are within half a unit of its last place. Beside
// a weight of 0, infinity or NaN the rest is ignored: so a masked weight is 0. For this reason a float16 value too small for a
// weight is stored beside the smallest weight, 2^-24, and not beside 0. Finite values too large for a weight become the largest.
#pragma once

#include "functors/finite.h"

namespace ampkit {

template <bool kHalf>
struct SplitFormat {
  static constexpr int kRestBits = kHalf ? 15 : 16;
  static constexpr int32_t kHalfUnit = 1 << (kRestBits - 1);
  static constexpr int32_t kInfinity = kHalf ? 0x7c00 : 0x7f80, kNaN = kHalf ? 0x7e00 : 0x7fc0;
  static constexpr int32_t kLargest = kHalf ? 0x477fe000 : 0x7f7f7fff;  // of the finite values, as float32 bits
};

constexpr int32_t kRebias = 0x38000000;         // between the exponents of float32 and float16
constexpr int32_t kFirstNormal = 0x400 << 15;  // the code of 2^-14
constexpr float kUnit = 0x1p-39f, kUnitsOfOne = 0x1p39f;
constexpr float kAlmostHalf = 0x1.fffffep-2f;  // rounds to nearest if the sum is truncated: 0.5 would round odd sums up

// bfloat16 without its exceptions: right if no value exceeds the largest weight. The two hold the bits of any other value too.
AMPKIT_INLINE float join_bits(uint32_t weight, int32_t rest) {
  return float_of_bits(static_cast<int32_t>((weight << 16) + static_cast<uint32_t>(rest)));
}

AMPKIT_INLINE void split_bits(float value, uint16_t& weight, int16_t& rest) {
  const uint32_t bits = static_cast<uint32_t>(float_bits(value));
  weight = static_cast<uint16_t>((bits + 0x8000u) >> 16);
  rest = static_cast<int16_t>(bits);
}

template <bool kHalf>
AMPKIT_INLINE float join(uint32_t weight, int32_t rest) {
  using Format = SplitFormat<kHalf>;
  const int32_t magnitude = static_cast<int32_t>(weight & 0x7fffu);
  const bool counts = magnitude != 0 && magnitude < Format::kInfinity;
  if (!kHalf) return join_bits(weight, counts ? rest : 0);
  if (magnitude > 1) {  // beside 2^-24 alone a rest may be longer
    rest = rest < -Format::kHalfUnit ? -Format::kHalfUnit : rest;
    rest = rest > Format::kHalfUnit - 1 ? Format::kHalfUnit - 1 : rest;
  }
  const int32_t code = static_cast<int32_t>(static_cast<uint32_t>(magnitude) << Format::kRestBits) + (counts ? rest : 0);
  // Of codes from 2^24 on float32 holds the even ones.
  const int32_t subnormal = float_bits(static_cast<float>(code & ~(code >> 24)) * kUnit);
  const int32_t normal = (code >> 2) + kRebias;
  const int32_t special = (magnitude << 13) | 0x7f800000;
  const int32_t finite = code < kFirstNormal ? subnormal : normal;
  return float_of_bits((magnitude < Format::kInfinity ? finite : special) | static_cast<int32_t>((weight & 0x8000u) << 16));
}

template <bool kHalf>
AMPKIT_INLINE void split(float value, uint16_t& weight, int16_t& rest) {
  using Format = SplitFormat<kHalf>;
  const int32_t bits = float_bits(value), given = bits & 0x7fffffff;
  const bool is_finite = given < 0x7f800000, is_nan = given > 0x7f800000;
  if (!kHalf) {
    split_bits(float_of_bits(is_finite && given > Format::kLargest ? bits - given + Format::kLargest : bits), weight, rest);
    weight = is_nan ? Format::kNaN : weight;
    rest = is_finite ? rest : 0;
    return;
  }
  const uint32_t sign = static_cast<uint32_t>(bits) >> 16 & 0x8000u;
  const int32_t magnitude = given > Format::kLargest ? Format::kLargest : given;
  const int32_t subnormal =
      static_cast<int32_t>(float_of_bits(magnitude > 0x38800000 ? 0x38800000 : magnitude) * kUnitsOfOne + kAlmostHalf);
  const int32_t code = magnitude < 0x38800000 ? subnormal : static_cast<int32_t>(static_cast<uint32_t>(magnitude - kRebias) << 2);
  int32_t rounded = (code + Format::kHalfUnit) >> Format::kRestBits;
  rounded = rounded == 0 && code != 0 ? 1 : rounded;
  const uint32_t special = is_nan ? Format::kNaN : static_cast<uint32_t>(Format::kInfinity) | sign;
  weight = static_cast<uint16_t>(is_finite ? static_cast<uint32_t>(rounded) | sign : special);
  rest = static_cast<int16_t>(is_finite ? code - (rounded << Format::kRestBits) : 0);
}

}  // namespace ampkit
