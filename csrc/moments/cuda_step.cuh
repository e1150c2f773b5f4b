// The CUDA kernel of steps whose moments are packed (moments/format.h), or whose results are rounded by numbers drawn
// (moments/rounding.h): cuda/multi_tensor_step.cuh with other loads and stores. A warp takes one block of moments at a time.
// Its lanes find the highest place by shuffles, and all of them stay until that is done.
#pragma once

#include "cuda/multi_tensor_step.cuh"
#include "moments/format.h"
#include "moments/rounding.h"

namespace ampkit {

static_assert(kMomentBlock == 32 * kWidth && kDraws == 2 * kWidth, "a warp takes one block of moments, two threads a call of Philox");
static_assert(kChunkSize % kMomentBlock == 0, "chunks hold whole blocks of moments");

// Two words: the numbers for the kWidth elements of a thread.
struct DrawnWords {
  uint32_t word[2];

  __device__ uint32_t number(int k) const { return number_of(word[k / 4], k % 4); }
};

template <class Code>
struct PackedMoment {
  uint8_t* codes;     // of the chunk
  uint32_t* highest;  // of its blocks

  template <int kDepth>
  __device__ PackedMoment(const Chunk<kDepth>& chunk, int list)
      : codes(chunk.template data_of<uint8_t>(list)),
        highest(reinterpret_cast<uint32_t*>(codes - chunk.offset + code_bytes(chunk.numel)) + chunk.offset / kMomentBlock) {}

  __device__ void load(int i, int size, float (&values)[kWidth]) const {
    const uint32_t base = base_of<Code>(i < size ? highest[i / kMomentBlock] >> kDropped : 0);
    uint32_t words[2] = {};
    if (i + kWidth <= size) {
      words[0] = reinterpret_cast<const uint32_t*>(codes + i)[0];
      words[1] = reinterpret_cast<const uint32_t*>(codes + i)[1];
    } else {
#pragma unroll
      for (int k = 0; k < kWidth; ++k)
        if (i + k < size) words[k / 4] |= static_cast<uint32_t>(codes[i + k]) << (k % 4 * 8);
    }
#pragma unroll
    for (int k = 0; k < kWidth; ++k)
      values[k] = __uint_as_float(Code::decode(words[k / 4] >> (k % 4 * 8) & 0xff, base));
  }

  // All lanes of a warp must call this. Elements beyond the end have the lowest place, whatever their values.
  __device__ void store(int i, int size, const float (&values)[kWidth], const DrawnWords& drawn, bool draws) const {
    uint32_t places[kWidth], found = 0;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      places[k] = Code::place(__float_as_uint(values[k]), draws ? place_dither(drawn.number(k)) : kHalfPlace);
      if (i + k >= size) places[k] = 0;
      if (places[k] > found) found = places[k];
    }
    for (int bits = 16; bits > 0; bits /= 2) {
      const uint32_t other = __shfl_xor_sync(0xffffffff, found, bits);
      found = other > found ? other : found;
    }
    const uint32_t base = base_of<Code>(found);
    uint32_t words[2] = {};
#pragma unroll
    for (int k = 0; k < kWidth; ++k)
      words[k / 4] |= Code::encode(__float_as_uint(values[k]), places[k], base) << (k % 4 * 8);
    if (i + kWidth <= size) {
      reinterpret_cast<uint32_t*>(codes + i)[0] = words[0];
      reinterpret_cast<uint32_t*>(codes + i)[1] = words[1];
    } else {
#pragma unroll
      for (int k = 0; k < kWidth; ++k)
        if (i + k < size) codes[i + k] = static_cast<uint8_t>(words[k / 4] >> (k % 4 * 8));
    }
    if (i % kMomentBlock == 0 && i < size) highest[i / kMomentBlock] = found << kDropped;
  }
};

template <class Functor, class Known>
struct RoundedStepKernel {
  typename Functor::Settings settings;
  const float* each;  // a number for each tensor, or nullptr
  Rounding rounding;
  bool writes_lower;

  using ChunkOfStep = Chunk<Functor::kStates + 3>;

  __device__ void operator()(ChunkOfStep chunk) const {
    constexpr int kStates = Functor::kStates, kLower = kStates + 2;
    if (settings.skips()) return;
    Known::tell(chunk);
    __shared__ Functor shared;
    __shared__ Philox philox;
    if (threadIdx.x == 0 && rounding.draws()) philox = rounding.numbers_of(chunk.tensor);
    if (threadIdx.x == 0) shared = Functor(settings);
    __syncthreads();
    const Functor& functor = shared;  // read again for each element, like the pointers: too many numbers for registers
    const float of_tensor = functor.each(each == nullptr ? 1.0f : each[chunk.tensor]);
    const bool splits = is_rest(chunk.dtype[kLower]);
    // The elements of a warp are all in the tensor, or their first part is.
    for (int begin = static_cast<int>(threadIdx.x) / 32 * kMomentBlock; begin < chunk.size; begin += kStride) {
      const int i = begin + static_cast<int>(threadIdx.x) % 32 * kWidth;
      float g[kWidth], p[kWidth], a[kWidth] = {}, b[kWidth] = {};
      DrawnWords drawn = {};
      chunk.load(0, i, g);
      if (splits)
        chunk.join_rests(1, chunk.fetch(1, i), chunk.fetch(kLower, i), p);
      else
        chunk.load(1, i, p);
      if constexpr (kStates > 0) load<SignedCode>(chunk, 2, i, a);
      if constexpr (kStates > 1) load<UnsignedCode>(chunk, 3, i, b);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) functor(g[k], p[k], a[k], b[k], of_tensor);
      if (splits) {
        chunk.store_split(1, kLower, i, p);
      } else {
        if (writes_lower) chunk.store(kLower, i, p);
        const bool draws = rounding.draws() && rounding.params;
        if (draws) draw(chunk, i, philox, kParam, drawn);
        store_drawn(chunk, 1, i, p, drawn, draws);
      }
      if (kStates > 0 && rounding.draws()) draw(chunk, i, philox, kMoments, drawn);
      if constexpr (kStates > 0) store<SignedCode>(chunk, 2, i, a, drawn);
      if constexpr (kStates > 1) store<UnsignedCode>(chunk, 3, i, b, drawn);
    }
  }

 private:
  template <class Code>
  __device__ void load(const ChunkOfStep& chunk, int list, int i, float (&values)[kWidth]) const {
    if (chunk.dtype[list] == DType::kPacked)
      PackedMoment<Code>(chunk, list).load(i, chunk.size, values);
    else
      chunk.load(list, i, values);
  }

  template <class Code>
  __device__ void store(const ChunkOfStep& chunk, int list, int i, float (&values)[kWidth],
                        const DrawnWords& drawn) const {
    if (chunk.dtype[list] != DType::kPacked) return store_drawn(chunk, list, i, values, drawn, rounding.draws());
    PackedMoment<Code>(chunk, list).store(i, chunk.size, values, drawn, rounding.draws());
  }

  // Rounds bfloat16 by numbers drawn if `draws`.
  static __device__ void store_drawn(const ChunkOfStep& chunk, int list, int i, float (&values)[kWidth],
                                     const DrawnWords& drawn, bool draws) {
    if (draws && chunk.dtype[list] == DType::kBFloat16) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k)
        values[k] = __uint_as_float(drawn_bfloat16(__float_as_uint(values[k]), drawn.number(k)) << 16);
    }
    chunk.store(list, i, values);
  }

  static __device__ void draw(const ChunkOfStep& chunk, int i, const Philox& philox, uint32_t stream, DrawnWords& drawn) {
    uint32_t words[4];
    const int64_t element = chunk.offset + i;
    philox(element / kDraws, stream, words);
    const bool is_second = element % kDraws != 0;
#pragma unroll
    for (int k = 0; k < 2; ++k) drawn.word[k] = is_second ? words[2 + k] : words[k];
  }
};

}  // namespace ampkit
