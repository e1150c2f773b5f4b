// The CUDA driver of the optimizers' steps, over any functor of functors/multi_tensor_step.h. Memory traffic: gradients read
// once, parameters and states read and written once, lower written once.
#pragma once

#include "cuda/multi_tensor_apply.cuh"
#include "step_lists.h"

namespace ampkit {

template <class Functor>
struct StepKernel {
  typename Functor::Settings settings;
  const float* each;  // a number for each tensor, or nullptr
  bool writes_lower;

  __device__ void operator()(const Chunk<Functor::kStates + 3>& chunk) const {
    constexpr int kStates = Functor::kStates, kLower = kStates + 2;
    if (settings.common.skips()) return;
    // The first elements are on their way while one thread makes the functor for its block: it may take powers in float64, and
    // reads what lies on the device.
    Raw raw[kStates + 2];
    int i = threadIdx.x * kWidth;
#pragma unroll
    for (int list = 0; list < kStates + 2; ++list) raw[list] = chunk.fetch(list, i);
    __shared__ Functor shared;
    if (threadIdx.x == 0) shared = Functor(settings);
    __syncthreads();
    const Functor functor = shared;
    const float of_tensor = functor.each(each == nullptr ? 1.0f : each[chunk.tensor]);
    while (i < chunk.size) {
      float values[kStates + 2][kWidth];
#pragma unroll
      for (int list = 0; list < kStates + 2; ++list) chunk.unpack(list, raw[list], values[list]);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        float state = 0, second_state = 0;
        if constexpr (kStates > 0) state = values[2][k];
        if constexpr (kStates > 1) second_state = values[3][k];
        functor(values[0][k], values[1][k], state, second_state, of_tensor);
        if constexpr (kStates > 0) values[2][k] = state;
        if constexpr (kStates > 1) values[3][k] = second_state;
      }
#pragma unroll
      for (int list = 1; list < kStates + 2; ++list) chunk.store(list, i, values[list]);
      if (writes_lower) chunk.store(kLower, i, values[1]);
      i += kStride;
#pragma unroll
      for (int list = 0; list < kStates + 2; ++list) raw[list] = chunk.fetch(list, i);  // nothing beyond the end
    }
  }
};

template <class Functor>
void run_step(const StepLists<Functor::kStates>& step_lists, const typename Functor::Settings& settings, const float* each) {
  const int32_t device = step_lists.grads.front().get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  auto lists = step_lists.flatten();
  const StepKernel<Functor> kernel{settings, each, step_lists.writes_lower()};
  multi_tensor_apply(lists.flat(), kernel, current_stream(device));
  lists.finish();
}

}  // namespace ampkit

#define AMPKIT_ON_DEVICE(op) op##_cuda
#define AMPKIT_RUN_STEP(Functor, ...) run_step<Functor>(__VA_ARGS__)
