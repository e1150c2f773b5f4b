// multi_tensor_step on the CPU: the blocks of cpu/step_block.h and moments/cpu_step_block.h over every rule of step.h.
#include "cpu/multi_tensor_apply.h"
#include "step.h"

#define AMPKIT_SOURCE "moments/cpu_step_block.h"
#include "cpu/each_capability.h"

namespace ampkit {
namespace {

// A pass over all blocks. each: a number for each tensor, or nullptr; sums: two for each block.
template <class Functor, class Step>
void run_blocks(const Step& step, const std::vector<Block<Step::kDepth>>& blocks, const float* each, double* sums) {
  static_assert(kBlockSize % kMomentBlock == 0, "blocks of tensors hold whole blocks of moments");
  const Functor functor(step.settings);
  const auto* tensors = step.lists.flat().data();
  const bool rounds = step.rounding.draws() || step.lists.has_packed();
  const auto plain = AMPKIT_VARIANT(step_block<Functor>);
  const auto rounded = [] {
    if constexpr (Functor::kTakesRests) return AMPKIT_VARIANT(rounded_step_block<Functor>);
    else return nullptr;
  }();
  for_each_block(blocks, [&](int64_t i) {
    const int64_t index = blocks[i].tensor - tensors;
    const float of_tensor = each == nullptr ? 1.0f : each[index];
    if constexpr (Functor::kTakesRests)
      if (rounds) return rounded(blocks[i], functor, of_tensor, step.rounding, index, step.writes_lower);
    plain(blocks[i], functor, of_tensor, step.writes_lower, sums + 2 * i);
  });
}

template <class Functor>
void take_step(const Step<Functor>& step) {
  if (step.settings.skips()) return;
  const auto& tensors = step.lists.flat();
  const auto blocks = blocks_of(tensors);
  std::vector<double> sums(Functor::kSumsSquares ? 2 * blocks.size() : 0);
  run_blocks<Functor>(step, blocks, step.each, sums.data());
  if constexpr (Functor::kSumsSquares) {
    std::vector<double> of_params(tensors.size()), of_directions(tensors.size());
    for (size_t i = 0; i < blocks.size(); ++i) {
      of_params[blocks[i].tensor - tensors.data()] += sums[2 * i];
      of_directions[blocks[i].tensor - tensors.data()] += sums[2 * i + 1];
    }
    std::vector<float> ratios(tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) ratios[i] = lamb_ratio(of_params[i], of_directions[i]);
    run_blocks<LambMoveFunctor>(step, blocks, ratios.data(), nullptr);
  }
}

}  // namespace

void multi_tensor_step_cpu(const std::string& rule, const TensorList& grads, const TensorList& written,
                           const std::vector<double>& settings, const MaybeTensor& lr, const MaybeTensor& step,
                           const MaybeTensor& inv_scale, const MaybeTensor& clip, const MaybeTensor& found_inf,
                           const MaybeTensor& each, const MaybeTensor& positions) {
  const StepArguments given{grads, written, settings, lr, step, inv_scale, clip, found_inf, each, positions};
  Rules::find(rule, given, [](const auto& one) { take_step(one); });
}

}  // namespace ampkit
