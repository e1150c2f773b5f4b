// multi_tensor_step on CUDA: the kernels of multi_tensor_step.cuh and moments/cuda_step.cuh over every rule of step.h.
#include "moments/cuda_step.cuh"
#include "ops.h"

namespace ampkit {
namespace {

constexpr DType kF = DType::kFloat, kH = DType::kHalf, kB = DType::kBFloat16, kRest = DType::kInt16, kPacked = DType::kPacked;

struct FinishRatio {
  const float* found_inf;
  const double *of_params, *of_directions;  // sums of squares of each block
  float* ratios;

  __device__ void operator()(int64_t tensor, int64_t first, int64_t last) const {
    if (found_inf != nullptr && *found_inf != 0.0f) return;
    const double params = sum_of_range(of_params, first, last), directions = sum_of_range(of_directions, first, last);
    if (threadIdx.x == 0) ratios[tensor] = lamb_ratio(params, directions);
  }
};

// Parameters without rests, rounded to nearest.
template <class Functor, class Step>
void run_plain(const Step& step, const float* each, double* of_params, double* of_directions, cudaStream_t stream) {
  const auto& tensors = step.lists.flat();
  with_mix<Mix<kF, kF, kF, kF>>(tensors, [&](auto known) {
    using Kernel = StepKernel<Functor, false, decltype(known)>;
    multi_tensor_apply(tensors, Kernel{step.settings, each, step.writes_lower, of_params, of_directions}, stream);
  });
}

template <class Functor>
void take_step(const Step<Functor>& step, TensorView beside, cudaStream_t stream) {
  const auto& tensors = step.lists.flat();
  if constexpr (Functor::kSumsSquares) {
    const std::vector<int64_t> first = first_blocks(tensors);
    Tensor squares = vector_beside(beside, 2 * first.back(), torch::headeronly::ScalarType::Double);
    Tensor of_tensors = vector_beside(beside, static_cast<int64_t>(tensors.size()), torch::headeronly::ScalarType::Float);
    double* of_params = static_cast<double*>(squares.mutable_data_ptr());
    double* of_directions = of_params + first.back();
    float* ratios = static_cast<float*>(of_tensors.mutable_data_ptr());
    run_plain<Functor>(step, nullptr, of_params, of_directions, stream);
    for_each_tensor(first, FinishRatio{step.settings.found_inf, of_params, of_directions, ratios}, stream);
    return run_plain<LambMoveFunctor>(step, ratios, nullptr, nullptr, stream);
  }
  if constexpr (Functor::kTakesRests) {
    bool splits = false;
    for (const auto& tensor : tensors) splits = splits || is_rest(tensor.dtype[step.kLower]);
    if (step.rounding.draws() || step.lists.has_packed())
      return with_mix<Mix<kB, kB, kPacked, kRest>, Mix<kB, kB, kPacked, kB>>(tensors, [&](auto known) {
        using Kernel = RoundedStepKernel<Functor, decltype(known)>;
        multi_tensor_apply(tensors, Kernel{step.settings, step.each, step.rounding, step.writes_lower}, stream);
      });
    if (splits)
      return with_mix<Mix<kB, kB, kF, kRest>, Mix<kF, kH, kF, kRest>>(tensors, [&](auto known) {
        using Kernel = StepKernel<Functor, true, decltype(known)>;
        multi_tensor_apply(tensors, Kernel{step.settings, step.each, step.writes_lower, nullptr, nullptr}, stream);
      });
  }
  run_plain<Functor>(step, step.each, nullptr, nullptr, stream);
}

}  // namespace

void multi_tensor_step_cuda(const std::string& rule, const TensorList& grads, const TensorList& written,
                            const std::vector<double>& settings, const MaybeTensor& lr, const MaybeTensor& step,
                            const MaybeTensor& inv_scale, const MaybeTensor& clip, const MaybeTensor& found_inf,
                            const MaybeTensor& each, const MaybeTensor& positions) {
  AMPKIT_CHECK(!grads.empty(), "multi_tensor_step: grads is empty");
  const OnDevice device = on_device_of("multi_tensor_step", grads.front());
  const StepArguments given{grads, written, settings, lr, step, inv_scale, clip, found_inf, each, positions};
  Rules::find(rule, given, [&](const auto& one) { take_step(one, grads.front(), device.stream); });
}

}  // namespace ampkit
