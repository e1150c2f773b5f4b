// multi_tensor_scale on CUDA. Memory traffic: each input read once, each output written once.
#include "cuda/multi_tensor_apply.cuh"
#include "functors/multi_tensor_scale.h"
#include "ops.h"

namespace ampkit {
namespace {

struct ScaleKernel {
  ScaleFunctor functor;
  float* found_inf;

  __device__ void operator()(const Chunk<2>& chunk) const {
    int32_t highest = 0;
    for (int64_t i = threadIdx.x * kWidth; i < chunk.size; i += kThreads * kWidth) {
      float x[kWidth], out[kWidth];
      chunk.load(0, i, x);
      highest = max(highest, highest_magnitude(x));
#pragma unroll
      for (int k = 0; k < kWidth; ++k) out[k] = functor(x[k]);
      chunk.store(1, i, out);
    }
    report(found_inf, highest);
  }
};

}  // namespace

void multi_tensor_scale_cuda(const TensorList& inputs, const TensorList& outputs, double scale,
                             const std::optional<Tensor>& found_inf) {
  constexpr const char* op = "multi_tensor_scale";
  if (inputs.empty() && outputs.empty()) return;
  float* flag = found_inf_data(op, found_inf, inputs);
  const int32_t device = outputs.front().get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  TensorLists<2> lists(op, {{{"inputs", inputs, Role::kRead}, {"outputs", outputs, Role::kWrite}}});
  multi_tensor_apply(lists.flat(), ScaleKernel{{static_cast<float>(scale)}, flag}, current_stream(device));
  lists.finish();
}

}  // namespace ampkit
