// In the place of CUDA's header: bfloat16, with torch's conversions and CUDA's NaN.
#pragma once

#include <torch/headeronly/util/BFloat16.h>

#include <cmath>

using __nv_bfloat16 = c10::BFloat16;

inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.x; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return {bits, c10::BFloat16::from_bits()}; }
inline float __bfloat162float(__nv_bfloat16 value) { return static_cast<float>(value); }
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  return std::isnan(value) ? __ushort_as_bfloat16(0x7fff) : __nv_bfloat16(value);
}
