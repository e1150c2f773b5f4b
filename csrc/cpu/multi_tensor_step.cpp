// multi_tensor_step on the CPU: the blocks of cpu/rounded_step_block.h over every rule of step.h. A rule with norms of its own has a
// file of its own.
#include "cpu/multi_tensor_step.h"

#define AMPKIT_SOURCE "cpu/rounded_step_block.h"
#include "cpu/each_capability.h"

namespace ampkit {
namespace {

template <class Functor>
void take_step(Step<Functor> step) {
  static_assert(kBlockSize % kMomentBlock == 0, "blocks of tensors hold whole blocks of moments");
  if (step.settings.skips()) return;
  const Functor functor(step.settings);
  const auto& tensors = step.lists.flat();
  const auto blocks = blocks_of(tensors);
  const bool streams = exceeds_caches(blocks);
  const bool rounds = step.rounding.draws() || step.lists.has_packed();
  const auto plain = AMPKIT_VARIANT(step_block<Functor>);
  const auto rounded = [] {
    if constexpr (Functor::kTakesRests) return AMPKIT_VARIANT(rounded_step_block<Functor>);
    else return nullptr;
  }();
  for_each_block(blocks, [&](int64_t i) {
    const int64_t index = blocks[i].tensor - tensors.data();
    const float each = step.each == nullptr ? 1.0f : step.each[index];
    if constexpr (Functor::kTakesRests)
      if (rounds) return rounded(blocks[i], functor, each, step.rounding, index, step.writes_lower, streams);
    plain(blocks[i], functor, each, step.writes_lower, streams);
  });
  step.lists.finish();
}

void take_step(Step<LambFunctor> step) { take_lamb_step(step); }

}  // namespace

void multi_tensor_step_cpu(const std::string& rule, const TensorList& grads, const TensorList& written,
                           const std::vector<double>& settings, const MaybeTensor& lr, const MaybeTensor& step,
                           const MaybeTensor& inv_scale, const MaybeTensor& clip, const MaybeTensor& found_inf,
                           const MaybeTensor& each, const MaybeTensor& positions) {
  const StepArguments given{grads, written, settings, lr, step, inv_scale, clip, found_inf, each, positions};
  Rules::find(rule, given, [](auto&& one) { take_step(std::move(one)); });
}

}  // namespace ampkit
