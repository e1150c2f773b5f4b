// Kernels with one mistake each: what the emulation must not let through (test_emulation.py).
#include <cuda_runtime.h>
#include <torch/csrc/stable/macros.h>

#include <cstring>

#include "module.h"

namespace emulation {
namespace {

__global__ void barrier_missed_kernel() {
  if (threadIdx.x != 7) __syncthreads();
}

__global__ void two_barriers_kernel() {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    __syncthreads();
}

__global__ void shuffle_missed_kernel() {
  if (threadIdx.x != 40) __shfl_down_sync(0xffffffff, 1.0f, 1);
}

__global__ void shuffle_of_absent_lane_kernel() {
  if (threadIdx.x % 32 < 16) __shfl_down_sync(0xffff, 1.0f, 8);
}

__global__ void misaligned_kernel(const char* bytes) {
  const uint4 four = *reinterpret_cast<const uint4*>(bytes);
  if (four.x == 1) __syncthreads();
}

__global__ void out_of_bounds_kernel(int index) {
  __shared__ float few[4];
  few[index] = 1.0f;
}

__global__ void shift_kernel(int by) {
  if ((1 << by) == 3) __syncthreads();
}

__global__ void overflow_kernel(int by) {
  if (by + 0x7fffffff == 3) __syncthreads();
}

__global__ void nothing_kernel() {}

}  // namespace

bool run_broken(const char* name) {
  alignas(16) static const char bytes[32] = {};
  const auto is = [&](const char* other) { return strcmp(name, other) == 0; };
  if (is("barrier_missed"))
    barrier_missed_kernel<<<2, 64, 0, nullptr>>>();
  else if (is("two_barriers"))
    two_barriers_kernel<<<1, 64, 0, nullptr>>>();
  else if (is("shuffle_missed"))
    shuffle_missed_kernel<<<1, 64, 0, nullptr>>>();
  else if (is("shuffle_of_absent_lane"))
    shuffle_of_absent_lane_kernel<<<1, 32, 0, nullptr>>>();
  else if (is("misaligned"))
    misaligned_kernel<<<1, 1, 0, nullptr>>>(bytes + 4);
  else if (is("out_of_bounds"))
    out_of_bounds_kernel<<<1, 1, 0, nullptr>>>(4);
  else if (is("shift"))
    shift_kernel<<<1, 1, 0, nullptr>>>(32);
  else if (is("overflow"))
    overflow_kernel<<<1, 1, 0, nullptr>>>(1);
  else if (is("too_many_threads"))
    nothing_kernel<<<1, 2048, 0, nullptr>>>();
  else if (is("unchecked")) {
    nothing_kernel<<<1, 1, 0, nullptr>>>();
    nothing_kernel<<<1, 1, 0, nullptr>>>();
  } else
    return false;
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return true;
}

}  // namespace emulation
