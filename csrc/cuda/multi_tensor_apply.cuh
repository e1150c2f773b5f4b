// The one driver of the CUDA kernels. A launch carries a table of tensors in its arguments (nothing is copied to the
// device beforehand); each block takes one chunk of one tensor and hands it to a functor. launch_plan.h decides what goes
// into which launch.
//
// Note [dtypes at run time]: a chunk's loads and stores ask its dtype, the same for all threads of a block, instead of
// being compiled for each combination of dtypes. The kernels wait for memory, so the branch is free, lists may mix
// dtypes within one launch, and an operator over k lists is one kernel, not 3^k.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include <cstdint>
#include <vector>

#include "functors/finite.h"
#include "launch_plan.h"
#include "tensor_lists.h"

namespace ampkit {

constexpr int kThreads = 512;
constexpr int kWidth = 8;  // elements a thread handles at a time: one 16-byte load of a 16-bit dtype, two of float32
constexpr int64_t kChunkSize = 64 * 1024;
constexpr int kMaxBlocks = 320;

// As many tensors as fit beside the blocks into the 4 KiB that every GPU allows for a kernel's arguments.
constexpr int max_tensors(int depth) { return depth <= 1 ? 110 : depth == 2 ? 72 : depth == 3 ? 56 : depth == 4 ? 44 : 36; }

template <int kDepth>
struct TensorTable {
  void* data[kDepth][max_tensors(kDepth)];
  int64_t numel[max_tensors(kDepth)];
  int32_t chunk_of_block[kMaxBlocks];
  uint8_t slot_of_block[kMaxBlocks];
  DType dtype[kDepth][max_tensors(kDepth)];
  int64_t first_block;  // index of this launch's block 0 among the blocks of all launches
};

template <int kDepth>
struct Chunk {
  void* data[kDepth];
  DType dtype[kDepth];
  int64_t size;
  int64_t block;  // index among the blocks of all launches
  bool aligned;

  // Elements i to i + kWidth as float32; zeros beyond the end.
  __device__ void load(int list, int64_t i, float (&values)[kWidth]) const {
    switch (dtype[list]) {
      case DType::kFloat: return load_as<float>(list, i, values);
      case DType::kHalf: return load_as<__half>(list, i, values);
      case DType::kBFloat16: return load_as<__nv_bfloat16>(list, i, values);
    }
  }

  __device__ void store(int list, int64_t i, const float (&values)[kWidth]) const {
    switch (dtype[list]) {
      case DType::kFloat: return store_as<float>(list, i, values);
      case DType::kHalf: return store_as<__half>(list, i, values);
      case DType::kBFloat16: return store_as<__nv_bfloat16>(list, i, values);
    }
  }

 private:
  template <class T>
  struct alignas(16) Vector {
    T elements[16 / sizeof(T)];
  };

  static __device__ float widen(float x) { return x; }
  static __device__ float widen(__half x) { return __half2float(x); }
  static __device__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
  static __device__ void narrow(float x, float& to) { to = x; }
  static __device__ void narrow(float x, __half& to) { to = __float2half_rn(x); }
  static __device__ void narrow(float x, __nv_bfloat16& to) { to = __float2bfloat16_rn(x); }

  template <class T>
  __device__ void load_as(int list, int64_t i, float (&values)[kWidth]) const {
    const T* from = static_cast<const T*>(data[list]) + i;
    constexpr int kPerVector = 16 / sizeof(T);
    if (aligned && i + kWidth <= size) {
#pragma unroll
      for (int v = 0; v < kWidth / kPerVector; ++v) {
        const Vector<T> vector = reinterpret_cast<const Vector<T>*>(from)[v];
#pragma unroll
        for (int k = 0; k < kPerVector; ++k) values[v * kPerVector + k] = widen(vector.elements[k]);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) values[k] = i + k < size ? widen(from[k]) : 0.0f;
    }
  }

  template <class T>
  __device__ void store_as(int list, int64_t i, const float (&values)[kWidth]) const {
    T* to = static_cast<T*>(data[list]) + i;
    constexpr int kPerVector = 16 / sizeof(T);
    if (aligned && i + kWidth <= size) {
#pragma unroll
      for (int v = 0; v < kWidth / kPerVector; ++v) {
        Vector<T> vector;
#pragma unroll
        for (int k = 0; k < kPerVector; ++k) narrow(values[v * kPerVector + k], vector.elements[k]);
        reinterpret_cast<Vector<T>*>(to)[v] = vector;
      }
    } else {
#pragma unroll
      for (int k = 0; k < kWidth; ++k)
        if (i + k < size) narrow(values[k], to[k]);
    }
  }
};

__host__ __device__ inline int64_t bytes_per_element(DType dtype) { return dtype == DType::kFloat ? 4 : 2; }

template <int kDepth, class Kernel>
__global__ void __launch_bounds__(kThreads) multi_tensor_apply_kernel(TensorTable<kDepth> table, Kernel kernel) {
  const int slot = table.slot_of_block[blockIdx.x];
  const int64_t offset = table.chunk_of_block[blockIdx.x] * kChunkSize;
  const int64_t left = table.numel[slot] - offset;
  Chunk<kDepth> chunk;
  chunk.size = left < kChunkSize ? left : kChunkSize;
  chunk.block = table.first_block + blockIdx.x;
  chunk.aligned = true;
#pragma unroll
  for (int k = 0; k < kDepth; ++k) {
    chunk.dtype[k] = table.dtype[k][slot];
    chunk.data[k] = static_cast<char*>(table.data[k][slot]) + offset * bytes_per_element(chunk.dtype[k]);
    chunk.aligned = chunk.aligned && reinterpret_cast<uintptr_t>(chunk.data[k]) % 16 == 0;
  }
  kernel(chunk);
}

// The chunks of each tensor are consecutive blocks, counted over all launches.
template <int kDepth>
std::vector<int64_t> first_blocks(const std::vector<FlatTensor<kDepth>>& tensors) {
  std::vector<int64_t> first{0};
  for (const FlatTensor<kDepth>& tensor : tensors) first.push_back(first.back() + chunks_of(tensor.numel, kChunkSize));
  return first;
}

// Runs kernel(chunk), a __device__ operator(), on every chunk of every tensor.
template <int kDepth, class Kernel>
void multi_tensor_apply(const std::vector<FlatTensor<kDepth>>& tensors, const Kernel& kernel, cudaStream_t stream) {
  static_assert(sizeof(TensorTable<kDepth>) + sizeof(Kernel) <= 4096, "kernel arguments end at 4 KiB");
  static_assert(max_tensors(kDepth) <= 256, "slots are uint8_t");
  std::vector<int64_t> sizes;
  sizes.reserve(tensors.size());
  for (const FlatTensor<kDepth>& tensor : tensors) sizes.push_back(tensor.numel);
  int64_t first_block = 0;
  for (const Launch& launch : pack_launches(sizes, kChunkSize, max_tensors(kDepth), kMaxBlocks)) {
    TensorTable<kDepth> table;
    table.first_block = first_block;
    for (size_t slot = 0; slot < launch.tensors.size(); ++slot) {
      const FlatTensor<kDepth>& tensor = tensors[launch.tensors[slot]];
      table.numel[slot] = tensor.numel;
      for (int k = 0; k < kDepth; ++k) {
        table.data[k][slot] = tensor.data[k];
        table.dtype[k][slot] = tensor.dtype[k];
      }
    }
    for (size_t block = 0; block < launch.blocks.size(); ++block) {
      table.slot_of_block[block] = static_cast<uint8_t>(launch.blocks[block].slot);
      table.chunk_of_block[block] = static_cast<int32_t>(launch.blocks[block].chunk);
    }
    const auto blocks = static_cast<unsigned>(launch.blocks.size());
    multi_tensor_apply_kernel<kDepth, Kernel><<<blocks, kThreads, 0, stream>>>(table, kernel);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    first_block += blocks;
  }
}

inline cudaStream_t current_stream(int32_t device_index) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return static_cast<cudaStream_t>(stream);
}

// Many threads may write, all of them the same value: no atomics needed.
__device__ inline void report(float* found_inf, int32_t highest_magnitude) {
  if (found_inf != nullptr && highest_magnitude >= kInfinityBits) *found_inf = 1.0f;
}

__device__ inline int32_t highest_magnitude(const float (&values)[kWidth]) {
  int32_t highest = 0;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) highest = max(highest, magnitude_bits(values[k]));
  return highest;
}

}  // namespace ampkit
