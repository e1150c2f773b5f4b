// In the place of CUDA's header: the part of it that csrc/cuda uses, for the host.
#pragma once

#include <math.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>
#include <cstring>

#include "threads.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
// __shared__, __grid_constant__ and <<<...>>> are rewritten by build.py, for no macro can stand for them.

using cudaStream_t = void*;
#ifndef SIMULATED_CUDA
inline AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return AOTI_TORCH_SUCCESS;
}
#endif

struct EmulatedIndex {
  unsigned x, y, z;
};
extern EmulatedIndex threadIdx, blockIdx, blockDim, gridDim;

#define EMULATED_SITE ::emulation::Site{__FILE__, __LINE__}
#define __builtin_assume(condition) ((void)0)
#define __syncthreads() ((void)::emulation::meet_block(::emulation::Combine::kNothing, false, EMULATED_SITE))
#define __syncthreads_or(predicate) ::emulation::meet_block(::emulation::Combine::kOr, (predicate) != 0, EMULATED_SITE)
#define __syncthreads_and(predicate) ::emulation::meet_block(::emulation::Combine::kAnd, (predicate) != 0, EMULATED_SITE)
#define __syncthreads_count(predicate) ::emulation::meet_block(::emulation::Combine::kCount, (predicate) != 0, EMULATED_SITE)
#define __syncwarp(mask) ((void)::emulation::exchange_in_warp(mask, 0, ::emulation::lane(), EMULATED_SITE))
#define __shfl_sync(mask, value, source) ::emulation::shuffle(mask, value, source, EMULATED_SITE)
#define __shfl_down_sync(mask, value, step) ::emulation::shuffle(mask, value, ::emulation::down(step), EMULATED_SITE)
#define __shfl_up_sync(mask, value, step) ::emulation::shuffle(mask, value, ::emulation::up(step), EMULATED_SITE)
#define __shfl_xor_sync(mask, value, bits) ::emulation::shuffle(mask, value, ::emulation::lane() ^ (bits), EMULATED_SITE)

// One thread runs at a time, so nothing comes between.
template <class Value>
Value atomicMin(Value* at, Value value) {
  const Value old = *at;
  if (value < old) *at = value;
  return old;
}

template <class Value>
Value atomicAdd(Value* at, Value value) {
  const Value old = *at;
  *at = old + value;
  return old;
}

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }

inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
