// multi_tensor_unscale_l2norm on CUDA. Memory traffic: each input read once, each output, if any, written once; one float64
// per block besides.
#include "cuda/norms.cuh"
#include "functors/multi_tensor_scale.h"
#include "ops.h"

namespace ampkit {
namespace {

struct UnscaleKernel {
  Number inv_scale;
  Findings findings;
  double* sum_of_block;
  bool writes;

  __device__ void operator()(const Chunk<2>& chunk) const {
    constexpr int kBatch = 2;
    const ScaleFunctor functor(inv_scale);
    double sum = 0;
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
        sum += sum_of_squares(x);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) out[k] = functor(x[k]);
        if (writes) chunk.store(1, start + b * kStride, out);
      }
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) sum_of_block[chunk.block] = sum;
    report(findings, chunk.tensor, highest);
  }
};

}  // namespace

TwoTensors multi_tensor_unscale_l2norm_cuda(const TensorList& inputs, const TensorList& outputs, double inv_scale,
                                            const MaybeTensor& inv_scale_tensor, bool per_tensor,
                                            const MaybeTensor& found_inf, const MaybeTensor& first_bad) {
  constexpr const char* op = "multi_tensor_unscale_l2norm";
  AMPKIT_CHECK(!inputs.empty(), op, ": inputs is empty");
  const OnDevice device = on_device_of(op, inputs.front());
  const Findings findings(op, found_inf, first_bad, inputs[0]);
  const Number factor = number(op, inv_scale, inv_scale_tensor, inputs[0]);
  // Without outputs the inputs take their place, and are only read.
  const bool writes = !outputs.empty();
  TensorLists<2> lists(op, {{{inputs, Role::kRead}, {writes ? outputs : inputs, writes ? Role::kWrite : Role::kRead}}});
  const std::vector<int64_t> first = first_blocks(lists.flat());
  const Norms norms(inputs.front(), first, per_tensor);
  multi_tensor_apply(lists.flat(), UnscaleKernel{factor, findings, norms.sum_of_block(), writes}, device.stream);
  return norms.finish(factor, device.stream);
}

}  // namespace ampkit
