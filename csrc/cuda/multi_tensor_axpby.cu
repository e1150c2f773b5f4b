// multi_tensor_axpby on CUDA. Memory traffic: both inputs read once, each output written once.
#include "cuda/multi_tensor_apply.cuh"
#include "functors/multi_tensor_axpby.h"
#include "ops.h"

namespace ampkit {
namespace {

struct AxpbyKernel {
  Number a;
  Number b;
  Findings findings;
  bool check_x;
  bool check_y;

  __device__ void operator()(const Chunk<3>& chunk) const {
    const AxpbyFunctor functor(a, b);
    int32_t highest = 0;
    for (int i = threadIdx.x * kWidth; i < chunk.size; i += kStride) {
      const Raw raw_x = chunk.fetch(0, i), raw_y = chunk.fetch(1, i);
      float x[kWidth], y[kWidth], out[kWidth];
      chunk.unpack(0, raw_x, x);
      chunk.unpack(1, raw_y, y);
      if (check_x) highest = max(highest, highest_magnitude(x));
      if (check_y) highest = max(highest, highest_magnitude(y));
#pragma unroll
      for (int k = 0; k < kWidth; ++k) out[k] = functor(x[k], y[k]);
      chunk.store(2, i, out);
    }
    report(findings, chunk.tensor, highest);
  }
};

}  // namespace

void multi_tensor_axpby_cuda(const TensorList& xs, const TensorList& ys, const TensorList& outputs, double a,
                             const MaybeTensor& a_tensor, double b, const MaybeTensor& b_tensor, int64_t arg_to_check,
                            const MaybeTensor& found_inf, const MaybeTensor& first_bad) {
  constexpr const char* op = "multi_tensor_axpby";
  AMPKIT_CHECK(arg_to_check >= -1 && arg_to_check <= 1, op, ": arg_to_check is ", arg_to_check,
               "; expected -1 (both), 0 (xs) or 1 (ys)");
  TensorLists<3> lists(op, {{{xs, Role::kRead}, {ys, Role::kRead}, {outputs, Role::kWrite}}});
  if (xs.empty()) return;
  const OnDevice device = on_device_of(op, xs[0]);
  const AxpbyKernel kernel{number(op, a, a_tensor, xs[0]), number(op, b, b_tensor, xs[0]),
                           {op, found_inf, first_bad, xs[0]}, arg_to_check != 1, arg_to_check != 0};
  multi_tensor_apply(lists.flat(), kernel, device.stream);
}

}  // namespace ampkit
