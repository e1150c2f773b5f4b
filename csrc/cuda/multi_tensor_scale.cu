// multi_tensor_scale on CUDA. Memory traffic: each input read once, each output written once.
#include "cuda/multi_tensor_apply.cuh"
#include "functors/multi_tensor_scale.h"
#include "ops.h"

namespace ampkit {
namespace {

struct ScaleKernel {
  Number scale;
  Findings findings;

  __device__ void operator()(const Chunk<2>& chunk) const {
    constexpr int kBatch = 2;
    const ScaleFunctor functor(scale);
    int32_t highest = 0;
    for (int start = threadIdx.x * kWidth; start < chunk.size; start += kBatch * kStride) {
      Raw raw[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) raw[b] = chunk.fetch(0, start + b * kStride);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        float x[kWidth], out[kWidth];
        chunk.unpack(0, raw[b], x);
        highest = max(highest, highest_magnitude(x));
#pragma unroll
        for (int k = 0; k < kWidth; ++k) out[k] = functor(x[k]);
        chunk.store(1, start + b * kStride, out);
      }
    }
    report(findings, chunk.tensor, highest);
  }
};

}  // namespace

void multi_tensor_scale_cuda(const TensorList& inputs, const TensorList& outputs, double scale,
                             const MaybeTensor& scale_tensor, const MaybeTensor& found_inf, const MaybeTensor& first_bad) {
  constexpr const char* op = "multi_tensor_scale";
  const TensorList& sources = inputs.empty() ? outputs : inputs;
  TensorLists<2> lists(op, {{{sources, Role::kRead}, {outputs, Role::kWrite}}});
  if (sources.empty()) return;
  const OnDevice device = on_device_of(op, sources[0]);
  const ScaleKernel kernel{number(op, scale, scale_tensor, sources[0]), {op, found_inf, first_bad, sources[0]}};
  multi_tensor_apply(lists.flat(), kernel, device.stream);
}

}  // namespace ampkit
