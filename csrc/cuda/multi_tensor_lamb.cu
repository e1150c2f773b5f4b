// multi_tensor_lamb on CUDA. Memory traffic as on the CPU (cpu/multi_tensor_lamb.cpp), in three steps: moments, and sums of
// squares of each block; the ratio of each tensor; the move.
#include "cuda/multi_tensor_step.cuh"
#include "cuda/norms.cuh"

namespace ampkit {
namespace {

struct LambMomentsKernel {
  LambFunctor::Settings settings;
  double* squares_of_params;  // of each block
  double* squares_of_directions;

  __device__ void operator()(const Chunk<5>& chunk) const {
    if (settings.skips()) return;
    __shared__ LambFunctor shared;
    if (threadIdx.x == 0) shared = LambFunctor(settings);
    __syncthreads();
    const LambFunctor& functor = shared;  // not copied: registers are short
    double of_params = 0, of_directions = 0;
    for (int i = threadIdx.x * kWidth; i < chunk.size; i += kStride) {
      Raw raw[4];
#pragma unroll
      for (int list = 0; list < 4; ++list) raw[list] = chunk.fetch(list, i);
      float g[kWidth], p[kWidth], m[kWidth], v[kWidth], u[kWidth];
      chunk.unpack(0, raw[0], g);
      chunk.unpack(1, raw[1], p);
      chunk.unpack(2, raw[2], m);
      chunk.unpack(3, raw[3], v);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) functor.update_moments(g[k], p[k], m[k], v[k]);
      chunk.store(2, i, m);
      chunk.store(3, i, v);
      // As the move will read them, should they be narrower.
      if (chunk.dtype[2] != DType::kFloat) chunk.load(2, i, m);
      if (chunk.dtype[3] != DType::kFloat) chunk.load(3, i, v);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        // Beyond the end everything is 0, and 0 / (0 + eps) may be 0 / 0.
        u[k] = i + k < chunk.size ? functor.direction(p[k], m[k], v[k]) : 0.0f;
      }
      of_params += sum_of_squares(p);
      of_directions += sum_of_squares(u);
    }
    of_params = block_sum(of_params);
    of_directions = block_sum(of_directions);
    if (threadIdx.x == 0) {
      squares_of_params[chunk.block] = of_params;
      squares_of_directions[chunk.block] = of_directions;
    }
  }
};

struct FinishRatio {
  const float* found_inf;
  const double* squares_of_params;
  const double* squares_of_directions;
  float* ratios;

  __device__ void operator()(int64_t tensor, int64_t first, int64_t last) const {
    if (found_inf != nullptr && *found_inf != 0.0f) return;
    const double of_params = sum_of_range(squares_of_params, first, last);
    const double of_directions = sum_of_range(squares_of_directions, first, last);
    if (threadIdx.x == 0) ratios[tensor] = lamb_ratio(of_params, of_directions);
  }
};

struct LambMoveKernel {
  LambFunctor::Settings settings;
  const float* ratios;
  bool writes_lower;

  __device__ void operator()(const Chunk<5>& chunk) const {
    if (settings.skips()) return;
    Raw raw[3];
    int i = threadIdx.x * kWidth;
#pragma unroll
    for (int list = 0; list < 3; ++list) raw[list] = chunk.fetch(list + 1, i);
    __shared__ LambFunctor shared;
    if (threadIdx.x == 0) shared = LambFunctor(settings);
    __syncthreads();
    const LambFunctor functor = shared;
    const float ratio = ratios[chunk.tensor];
    while (i < chunk.size) {
      float p[kWidth], m[kWidth], v[kWidth];
      chunk.unpack(1, raw[0], p);
      chunk.unpack(2, raw[1], m);
      chunk.unpack(3, raw[2], v);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) p[k] = p[k] - functor.lr * (functor.direction(p[k], m[k], v[k]) * ratio);
      chunk.store(1, i, p);
      if (writes_lower) chunk.store(4, i, p);
      i += kStride;
#pragma unroll
      for (int list = 0; list < 3; ++list) raw[list] = chunk.fetch(list + 1, i);
    }
  }
};

}  // namespace

void take_lamb_step(Step<LambFunctor>& step, TensorView beside, cudaStream_t stream) {
  const auto& tensors = step.lists.flat();
  const std::vector<int64_t> first = first_blocks(tensors);
  const int64_t blocks = first.back(), count = static_cast<int64_t>(tensors.size());
  Tensor squares = vector_beside(beside, 2 * blocks, torch::headeronly::ScalarType::Double);
  Tensor ratio = vector_beside(beside, count, torch::headeronly::ScalarType::Float);
  double* of_params = static_cast<double*>(squares.mutable_data_ptr());
  double* of_directions = of_params + blocks;
  float* ratios = static_cast<float*>(ratio.mutable_data_ptr());
  multi_tensor_apply(tensors, LambMomentsKernel{step.settings, of_params, of_directions}, stream);
  for_each_tensor(first, FinishRatio{step.settings.found_inf, of_params, of_directions, ratios}, stream);
  multi_tensor_apply(tensors, LambMoveKernel{step.settings, ratios, step.writes_lower}, stream);
  step.lists.finish();
}

}  // namespace ampkit
