// multi_tensor_axpby on CUDA. Memory traffic: both inputs read once, each output written once.
#include "cuda/multi_tensor_apply.cuh"
#include "functors/multi_tensor_axpby.h"
#include "ops.h"

namespace ampkit {
namespace {

struct AxpbyKernel {
  AxpbyFunctor functor;
  float* found_inf;
  bool check_x;
  bool check_y;

  __device__ void operator()(const Chunk<3>& chunk) const {
    int32_t highest = 0;
    for (int64_t i = threadIdx.x * kWidth; i < chunk.size; i += kThreads * kWidth) {
      float x[kWidth], y[kWidth], out[kWidth];
      chunk.load(0, i, x);
      chunk.load(1, i, y);
      if (check_x) highest = max(highest, highest_magnitude(x));
      if (check_y) highest = max(highest, highest_magnitude(y));
#pragma unroll
      for (int k = 0; k < kWidth; ++k) out[k] = functor(x[k], y[k]);
      chunk.store(2, i, out);
    }
    report(found_inf, highest);
  }
};

}  // namespace

void multi_tensor_axpby_cuda(const TensorList& xs, const TensorList& ys, const TensorList& outputs, double a, double b,
                             const std::optional<Tensor>& found_inf, int64_t arg_to_check) {
  constexpr const char* op = "multi_tensor_axpby";
  AMPKIT_CHECK(arg_to_check >= -1 && arg_to_check <= 1, op, ": arg_to_check is ", arg_to_check,
               "; expected -1 (both), 0 (xs) or 1 (ys)");
  if (xs.empty() && ys.empty() && outputs.empty()) return;
  float* flag = found_inf_data(op, found_inf, xs);
  const Tensor& some = xs.empty() ? (ys.empty() ? outputs.front() : ys.front()) : xs.front();
  const torch::stable::accelerator::DeviceGuard guard(some.get_device_index());
  TensorLists<3> lists(op, {{{"xs", xs, Role::kRead}, {"ys", ys, Role::kRead}, {"outputs", outputs, Role::kWrite}}});
  const AxpbyKernel kernel{{static_cast<float>(a), static_cast<float>(b)}, flag, arg_to_check != 1, arg_to_check != 0};
  multi_tensor_apply(lists.flat(), kernel, current_stream(some.get_device_index()));
  lists.finish();
}

}  // namespace ampkit
