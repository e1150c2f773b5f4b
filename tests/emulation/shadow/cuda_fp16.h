// In the place of CUDA's header: float16, with torch's conversions and CUDA's NaN.
#pragma once

#include <torch/headeronly/util/Half.h>

#include <cmath>

using __half = c10::Half;

inline unsigned short __half_as_ushort(__half value) { return value.x; }
inline __half __ushort_as_half(unsigned short bits) { return {bits, c10::Half::from_bits()}; }
inline float __half2float(__half value) { return static_cast<float>(value); }
inline __half __float2half_rn(float value) { return std::isnan(value) ? __ushort_as_half(0x7fff) : __half(value); }
