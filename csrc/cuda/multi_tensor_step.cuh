// The CUDA kernel of the optimizers' steps, over any functor of functors/multi_tensor_step.h. Memory traffic: gradients read
// once, parameters and states read and written once, lower written once, or, where it holds rests (Note [weights and rests]), read
// and written once.
#pragma once

#include <type_traits>

#include "cuda/norms.cuh"
#include "step.h"

namespace ampkit {

// kSplits: some parameters may have rests. That is a kernel of its own, because of its registers.
template <class Functor, bool kSplits, class Known>
struct StepKernel {
  typename Functor::Settings settings;
  const float* each;  // a number for each tensor, or nullptr
  bool writes_lower;
  double *of_params, *of_directions;  // for rules with kSumsSquares, the sums of squares of each block

  __device__ void operator()(Chunk<Functor::kStates + 3> chunk) const {
    constexpr int kStates = Functor::kStates, kLower = kStates + 2;
    if (settings.skips()) return;
    Known::tell(chunk);
    if constexpr (Functor::kSumsSquares) chunk.dtype[2] = chunk.dtype[3] = DType::kFloat;  // step.h refuses others
    // The first elements are being loaded while one thread makes the functor for its block: it computes powers in float64, and
    // reads numbers on the device.
    Raw raw[kStates + 2], rests;
    const bool splits = kSplits && is_rest(chunk.dtype[kLower]);
    int i = threadIdx.x * kWidth;
#pragma unroll
    for (int list = 0; list < kStates + 2; ++list) raw[list] = chunk.fetch(list, i);
    if (splits) rests = chunk.fetch(kLower, i);
    __shared__ Functor shared;
    if (threadIdx.x == 0) shared = Functor(settings);
    __syncthreads();
    // Read again for each element if sums take the registers.
    const std::conditional_t<Functor::kSumsSquares, const Functor&, const Functor> functor = shared;
    double squares[2] = {};
    const float of_tensor = functor.each(each == nullptr ? 1.0f : each[chunk.tensor]);
    while (i < chunk.size) {
      float values[kStates + 2][kWidth];
#pragma unroll
      for (int list = 0; list < kStates + 2; ++list) chunk.unpack(list, raw[list], values[list]);
      if (splits) chunk.join_rests(1, raw[1], rests, values[1]);
      if constexpr (Functor::kSumsSquares) squares[0] += sum_of_squares(values[1]);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        float state = 0, second_state = 0;
        if constexpr (kStates > 0) state = values[2][k];
        if constexpr (kStates > 1) second_state = values[3][k];
        functor(values[0][k], values[1][k], state, second_state, of_tensor);
        if constexpr (kStates > 0) values[2][k] = state;
        if constexpr (kStates > 1) values[3][k] = second_state;
        // Beyond the end everything is 0, and 0 / (0 + eps) may be 0 / 0.
        if (Functor::kSumsSquares && i + k >= chunk.size) values[1][k] = 0.0f;
      }
      if constexpr (Functor::kSumsSquares) {
        squares[1] += sum_of_squares(values[1]);
      } else if (splits) {
        chunk.store_split(1, kLower, i, values[1]);
      } else {
        chunk.store(1, i, values[1]);
        if (writes_lower) chunk.store(kLower, i, values[1]);
      }
      if constexpr (!Functor::kKeepsStates) {
#pragma unroll
        for (int list = 2; list < kStates + 2; ++list) chunk.store(list, i, values[list]);
      }
      i += kStride;
#pragma unroll
      for (int list = 0; list < kStates + 2; ++list) raw[list] = chunk.fetch(list, i);  // nothing beyond the end
      if (splits) rests = chunk.fetch(kLower, i);
    }
    if constexpr (Functor::kSumsSquares) {
      squares[0] = block_sum(squares[0]);
      squares[1] = block_sum(squares[1]);
      if (threadIdx.x != 0) return;
      of_params[chunk.block] = squares[0];
      of_directions[chunk.block] = squares[1];
    }
  }
};

}  // namespace ampkit
