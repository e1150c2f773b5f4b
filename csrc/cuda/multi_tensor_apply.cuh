// The one driver of the CUDA kernels. A launch carries a table of tensors in its arguments (nothing is copied to the
// device beforehand), and has a block for each chunk of each tensor. A block finds its tensor in prefix sums: a table with an entry
// for each block would have room for a thousand. Tensors without elements take no slot, and no launch is empty.
//
// Note [dtypes at run time]: a chunk's loads and stores check its dtype, the same for all threads of a block, instead of
// being compiled for each combination of dtypes. The kernels wait for memory, so the branch is free, lists may mix
// dtypes within one launch, and an operator over k lists is one kernel, not 3^k.
//
// Note [sectors]: a thread's eight elements of float32 are two accesses of 16 bytes, and its neighbour's begin 32 bytes on. So each
// request of a warp touches 32 sectors of 32 bytes for 512 bytes, half of each; 16 would do. Loads lose little: the second request
// finds its halves in L1. Stores reach L2 as twice as many sectors, whose halves meet there before they go to memory. A step
// of Adam with rests moves 26 bytes an element, 12 of them written, 8 in float32: L2 sees as much as for 34. On GPUs whose L2
// has twice the bandwidth of their memory (A100) that is no limit; with HBM3e (H200) it may be one. Two runs of four elements, 128
// apart, would be whole sectors for every dtype, at twice the requests for 16-bit ones. But moments and random numbers are made of
// runs of eight, and would need a layout of their own; to be decided by a measurement.
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
#include "functors/split.h"
#include "tensor_lists.h"

namespace ampkit {

constexpr int kThreads = 512;
constexpr int kWidth = 8;  // elements a thread handles at a time: one 16-byte load of a 16-bit dtype, two of float32
constexpr int kStride = kThreads * kWidth;
constexpr int kChunkSize = 64 * 1024;  // indices inside a chunk are 32 bits: 64 cost registers, and so blocks at a time
constexpr int kBlocksAtATime = 2;  // of a multiprocessor: 64 registers a thread
constexpr int kMaxArguments = 32764;  // bytes, from CUDA 12.1 and the Volta generation on
constexpr int kFewArguments = 4092;    // of lists that fit: every launch copies its arguments to the device
constexpr int kMaxKernelSize = 512;    // of these, for a kernel's own arguments besides the tensors

// A table of as many tensors as kBytes of a launch's arguments have room for.
template <int kDepth, int kBytes>
struct TensorTable {
  static constexpr int kBytesOfTensor = kDepth * (sizeof(void*) + sizeof(DType)) + sizeof(int64_t) + 2 * sizeof(int32_t);
  static constexpr int kMaxTensors = (kBytes - kMaxKernelSize) / kBytesOfTensor / 8 * 8;

  void* data[kDepth][kMaxTensors];
  int64_t numel[kMaxTensors];
  int64_t first_block;  // index of this launch's block 0 among the blocks of all launches
  int32_t tensors;
  int32_t tensor[kMaxTensors];  // index into the lists
  int32_t first_block_of[kMaxTensors];  // within this launch
  DType dtype[kDepth][kMaxTensors];
};

// kWidth elements as they are in memory. They are unpacked later, so that a thread can have several loads in flight:
// it waits at the first use of a value, not at its load.
struct Raw {
  uint32_t words[kWidth];  // a 16-bit dtype fills the first half, two elements a word
};

template <int kDepth>
struct Chunk {
  void* const volatile* data;  // in shared memory, and read there at each access, because pointers take registers
  DType dtype[kDepth];
  int size;
  int64_t offset, numel;  // its first element in its tensor, and the tensor's number of elements
  int64_t block;  // index among the blocks of all launches
  int32_t tensor;  // index into the lists

  template <class Element>
  __device__ Element* data_of(int list) const {
    void* begin = data[list];
    __builtin_assume(__isGlobal(begin));  // else each access would find out its memory space at run time
    return static_cast<Element*>(begin);
  }

  // Whether a thread takes its elements of this list in whole accesses of 16 bytes.
  __device__ bool is_whole(int list, int i) const {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(data_of<void>(list));
    return begin % 16 == 0 && i + kWidth <= size;
  }

  // Elements i to i + kWidth; zeros beyond the end.
  __device__ Raw fetch(int list, int i) const {
    Raw raw;
    if (dtype[list] == DType::kFloat) {
      const uint32_t* from = data_of<const uint32_t>(list) + i;
      if (is_whole(list, i)) {
        const uint4 low = reinterpret_cast<const uint4*>(from)[0];
        const uint4 high = reinterpret_cast<const uint4*>(from)[1];
        raw = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      } else {
#pragma unroll
        for (int k = 0; k < kWidth; ++k) raw.words[k] = i + k < size ? from[k] : 0;
      }
    } else {
      const uint16_t* from = data_of<const uint16_t>(list) + i;
      if (is_whole(list, i)) {
        const uint4 all = *reinterpret_cast<const uint4*>(from);
        raw = {all.x, all.y, all.z, all.w, 0, 0, 0, 0};
      } else {
#pragma unroll
        for (int k = 0; k < kWidth; k += 2) {
          const uint32_t even = i + k < size ? from[k] : 0;
          const uint32_t odd = i + k + 1 < size ? from[k + 1] : 0;
          raw.words[k / 2] = even | odd << 16;
        }
      }
    }
    return raw;
  }

  __device__ void unpack(int list, const Raw& raw, float (&values)[kWidth]) const {
    if (dtype[list] == DType::kFloat) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) values[k] = __uint_as_float(raw.words[k]);
    } else if (dtype[list] == DType::kBFloat16) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) values[k] = __uint_as_float(half_word(raw, k) << 16);
    } else {
#pragma unroll
      for (int k = 0; k < kWidth; ++k)
        values[k] = __half2float(__ushort_as_half(static_cast<unsigned short>(half_word(raw, k))));
    }
  }

  __device__ void load(int list, int i, float (&values)[kWidth]) const { unpack(list, fetch(list, i), values); }

  __device__ void store(int list, int i, const float (&values)[kWidth]) const {
    uint32_t words[kWidth];
    if (dtype[list] == DType::kFloat) {
      uint32_t* to = data_of<uint32_t>(list) + i;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) words[k] = __float_as_uint(values[k]);
      if (is_whole(list, i)) {
        reinterpret_cast<uint4*>(to)[0] = make_uint4(words[0], words[1], words[2], words[3]);
        reinterpret_cast<uint4*>(to)[1] = make_uint4(words[4], words[5], words[6], words[7]);
      } else {
#pragma unroll
        for (int k = 0; k < kWidth; ++k)
          if (i + k < size) to[k] = words[k];
      }
      return;
    }
    if (dtype[list] == DType::kBFloat16) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) words[k] = __bfloat16_as_ushort(__float2bfloat16_rn(values[k]));
    } else {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) words[k] = __half_as_ushort(__float2half_rn(values[k]));
    }
    store_half_words(list, i, words);
  }

  // Weights of one list and their rests of another (Note [weights and rests]) as float32, and back.
  __device__ void join_rests(int weights, const Raw& raw_weights, const Raw& raw_rests, float (&values)[kWidth]) const {
    const bool is_half = dtype[weights] == DType::kHalf;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const uint32_t weight = half_word(raw_weights, k);
      const int32_t rest = static_cast<int16_t>(half_word(raw_rests, k));
      values[k] = is_half ? join<true>(weight, rest) : join<false>(weight, rest);
    }
  }

  __device__ void store_split(int weights, int rests, int i, const float (&values)[kWidth]) const {
    const bool is_half = dtype[weights] == DType::kHalf;
    uint32_t words[kWidth], rest_words[kWidth];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      uint16_t weight = 0;
      int16_t rest = 0;
      is_half ? split<true>(values[k], weight, rest) : split<false>(values[k], weight, rest);
      words[k] = weight;
      rest_words[k] = static_cast<uint16_t>(rest);
    }
    store_half_words(rests, i, rest_words);
    store_half_words(weights, i, words);
  }

 private:
  static __device__ uint32_t half_word(const Raw& raw, int k) { return raw.words[k / 2] >> (k % 2 * 16) & 0xffff; }

  __device__ void store_half_words(int list, int i, const uint32_t (&words)[kWidth]) const {
    uint16_t* to = data_of<uint16_t>(list) + i;
    if (is_whole(list, i)) {
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0] | words[1] << 16, words[2] | words[3] << 16,
                                                 words[4] | words[5] << 16, words[6] | words[7] << 16);
    } else {
#pragma unroll
      for (int k = 0; k < kWidth; ++k)
        if (i + k < size) to[k] = static_cast<uint16_t>(words[k]);
    }
  }
};

__host__ __device__ inline int64_t bytes_per_element(DType dtype) {
  return dtype == DType::kFloat ? 4 : dtype == DType::kPacked ? 1 : 2;
}

// Lists of a step whose dtypes the compiler knows: its loads and stores check nothing, and take fewer instructions and registers.
// For the mixes that most models train in; benchmarks/ptxas.py prints the savings.
template <DType kGrad, DType kParam, DType kState, DType kLower>
struct Mix {
  template <int kDepth>
  static AMPKIT_INLINE constexpr DType of(int list) {
    return list == 0 ? kGrad : list == 1 ? kParam : list == kDepth - 1 ? kLower : kState;
  }
  template <int kDepth>
  static bool holds(const std::vector<FlatTensor<kDepth>>& tensors) {
    for (const FlatTensor<kDepth>& tensor : tensors)
      for (int k = 0; k < kDepth; ++k)
        if (tensor.dtype[k] != of<kDepth>(k)) return false;
    return true;
  }
  template <int kDepth>
  static __device__ void tell(Chunk<kDepth>& chunk) {
#pragma unroll
    for (int k = 0; k < kDepth; ++k) chunk.dtype[k] = of<kDepth>(k);
  }
};

struct AnyMix {
  template <int kDepth>
  static __device__ void tell(Chunk<kDepth>&) {}
};

// Calls run with the first of these mixes that all tensors have, or with AnyMix.
template <class... Mixes, int kDepth, class Run>
void with_mix(const std::vector<FlatTensor<kDepth>>& tensors, const Run& run) {
  const bool is_known = ((Mixes::template holds<kDepth>(tensors) && (run(Mixes()), true)) || ...);
  if (!is_known) run(AnyMix());
}

// The slot that a block works on: the last of these that begins there or before.
__device__ inline int slot_of(const int32_t* first_blocks, int slots, int32_t block) {
  int slot = 0;
  for (int beyond = slots; beyond - slot > 1;) {
    const int middle = (slot + beyond) / 2;
    if (first_blocks[middle] <= block)
      slot = middle;
    else
      beyond = middle;
  }
  return slot;
}

template <int kDepth, int kBytes, class Kernel>
__global__ void __launch_bounds__(kThreads, kBlocksAtATime)
    multi_tensor_apply_kernel(const __grid_constant__ TensorTable<kDepth, kBytes> table, const __grid_constant__ Kernel kernel) {
  const int32_t block = static_cast<int32_t>(blockIdx.x);
  const int slot = slot_of(table.first_block_of, table.tensors, block);
  const int64_t offset = static_cast<int64_t>(block - table.first_block_of[slot]) * kChunkSize;
  const int64_t left = table.numel[slot] - offset;
  __shared__ void* data[kDepth];
  if (threadIdx.x < kDepth) {
    const int64_t width = bytes_per_element(table.dtype[threadIdx.x][slot]);
    data[threadIdx.x] = static_cast<char*>(table.data[threadIdx.x][slot]) + offset * width;
  }
  __syncthreads();
  Chunk<kDepth> chunk;
  chunk.data = data;
  chunk.size = left < kChunkSize ? static_cast<int>(left) : kChunkSize;
  chunk.offset = offset;
  chunk.numel = table.numel[slot];
  chunk.block = table.first_block + blockIdx.x;
  chunk.tensor = table.tensor[slot];
#pragma unroll
  for (int k = 0; k < kDepth; ++k) chunk.dtype[k] = table.dtype[k][slot];
  kernel(chunk);
}

inline int64_t chunks_of(int64_t size) { return size / kChunkSize + (size % kChunkSize != 0); }

// The chunks of each tensor are consecutive blocks, counted over all launches.
template <int kDepth>
std::vector<int64_t> first_blocks(const std::vector<FlatTensor<kDepth>>& tensors) {
  std::vector<int64_t> first{0};
  for (const FlatTensor<kDepth>& tensor : tensors) first.push_back(first.back() + chunks_of(tensor.numel));
  return first;
}

template <int kBytes, int kDepth, class Kernel>
void launch_all(const std::vector<FlatTensor<kDepth>>& tensors, const Kernel& kernel, cudaStream_t stream) {
  using Table = TensorTable<kDepth, kBytes>;
  static_assert(sizeof(Table) + sizeof(Kernel) <= kBytes, "a launch cannot carry so many arguments");
  int64_t first_block = 0;
  for (size_t i = 0; i < tensors.size();) {
    Table table;
    table.first_block = first_block;
    table.tensors = 0;
    int64_t blocks = 0;
    for (; i < tensors.size() && table.tensors < Table::kMaxTensors; ++i) {
      const FlatTensor<kDepth>& tensor = tensors[i];
      if (tensor.numel == 0) continue;
      const int32_t slot = table.tensors++;
      table.numel[slot] = tensor.numel;
      table.tensor[slot] = static_cast<int32_t>(i);
      table.first_block_of[slot] = static_cast<int32_t>(blocks);
      for (int k = 0; k < kDepth; ++k) {
        table.data[k][slot] = tensor.data[k];
        table.dtype[k][slot] = tensor.dtype[k];
      }
      blocks += chunks_of(tensor.numel);
    }
    if (blocks == 0) return;
    // Not a Refusal: earlier launches may have written.
    if (blocks > INT32_MAX) throw std::runtime_error("a launch of more than 2^31 - 1 blocks");
    const auto grid = static_cast<unsigned>(blocks);
    multi_tensor_apply_kernel<kDepth, kBytes, Kernel><<<grid, kThreads, 0, stream>>>(table, kernel);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    first_block += blocks;
  }
}

// Runs kernel(chunk), a __device__ operator(), on every chunk of every tensor.
template <int kDepth, class Kernel>
void multi_tensor_apply(const std::vector<FlatTensor<kDepth>>& tensors, const Kernel& kernel, cudaStream_t stream) {
  if (tensors.size() <= TensorTable<kDepth, kFewArguments>::kMaxTensors)
    launch_all<kFewArguments>(tensors, kernel, stream);
  else
    launch_all<kMaxArguments>(tensors, kernel, stream);
}

// The device of a call, which is the current one meanwhile.
struct OnDevice {
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream;
};

// The dispatcher calls these operators if any tensor is on CUDA, even if the first one is not.
inline OnDevice on_device_of(const char* op, TensorView first) {
  AMPKIT_CHECK(first.device_type() == aoti_torch_device_type_cuda(), op,
               ": the lists begin on another device than CUDA, and something else is there; one call serves one device");
  const int32_t index = first.get_device_index();
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index, &stream));
  return {torch::stable::accelerator::DeviceGuard(index), static_cast<cudaStream_t>(stream)};
}

// Reports the findings of a block's threads, by one of them. Every thread of the block must call this. All write the same value
// to the flag: no atomics needed.
__device__ inline void report(const Findings& findings, int32_t tensor, int32_t highest_magnitude) {
  const bool found = __syncthreads_or(highest_magnitude >= kInfinityBits);
  if (!found || threadIdx.x != 0) return;
  if (findings.found_inf != nullptr) *findings.found_inf = 1.0f;
  if (findings.first_bad != nullptr)
    atomicMin(reinterpret_cast<long long*>(findings.first_bad), static_cast<long long>(tensor));
}

__device__ inline int32_t highest_magnitude(const float (&values)[kWidth]) {
  int32_t highest = 0;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) highest = max(highest, magnitude_bits(values[k]));
  return highest;
}

}  // namespace ampkit
