// update_scale on CUDA: a few numbers, one thread.
#include "cuda/multi_tensor_apply.cuh"
#include "functors/update_scale.h"
#include "ops.h"
#include "scale_arguments.h"

namespace ampkit {
namespace {

__global__ void update_scale_kernel(UpdateScaleFunctor update, ScaleArguments arguments) {
  update(*arguments.state, *arguments.found_inf);
}

}  // namespace

void update_scale_cuda(const Tensor& state, const Tensor& found_inf, double growth_factor, double backoff_factor,
                       int64_t growth_interval, int64_t hysteresis, double min_scale, double max_scale) {
  const ScaleArguments arguments(state, found_inf);
  const OnDevice device = on_device_of("update_scale", state);
  const UpdateScaleFunctor update{growth_factor, backoff_factor, growth_interval, hysteresis, static_cast<float>(min_scale),
                                  static_cast<float>(max_scale)};
  update_scale_kernel<<<1, 1, 0, device.stream>>>(update, arguments);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace ampkit
