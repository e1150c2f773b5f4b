// run_step: cpu/step_block.h over lists of tensors, with the block of a functor for the instruction set at hand.
#pragma once

#include "cpu/multi_tensor_apply.h"
#include "step_lists.h"

namespace ampkit {

// step_block(block, functor, each, writes_lower, streams, index of the tensor) on every block.
template <class Functor, class StepBlock>
void run_blocks(TensorLists<Functor::kStates + 3>& lists, const Functor& functor, const float* each, bool writes_lower,
                const StepBlock& step_block) {
  const auto& tensors = lists.flat();
  const auto blocks = blocks_of(tensors);
  const bool streams = exceeds_caches(blocks);
  for_each_block(blocks, [&](int64_t i) {
    const int64_t index = blocks[i].tensor - tensors.data();
    step_block(blocks[i], functor, each == nullptr ? 1.0f : each[index], writes_lower, streams, index);
  });
  lists.finish();
}

template <class Functor, class StepBlock>
void run_step(const StepLists<Functor::kStates>& step_lists, const typename Functor::Settings& settings, const float* each,
              StepBlock step_block) {
  auto lists = step_lists.flatten(Functor::kTakesRests);
  if (settings.common.skips()) return;
  run_blocks(lists, Functor(settings), each, step_lists.writes_lower(),
             [&](const auto& block, const Functor& functor, float of_tensor, bool writes_lower, bool streams, int64_t) {
               step_block(block, functor, of_tensor, writes_lower, streams);
             });
}

// The same with cpu/rounded_step_block.h where moments are packed, or numbers are drawn.
template <class Functor, class StepBlock, class RoundedStepBlock>
void run_rounded_step(const StepLists<Functor::kStates>& step_lists, const typename Functor::Settings& settings,
                      const float* each, const Rounding& rounding, StepBlock step_block, RoundedStepBlock rounded_step_block) {
  static_assert(kBlockSize % kMomentBlock == 0, "blocks of tensors hold whole blocks of moments");
  auto lists = step_lists.flatten(Functor::kTakesRests);
  if (settings.common.skips()) return;
  const bool rounds = rounding.draws() || lists.has_packed();
  run_blocks(lists, Functor(settings), each, step_lists.writes_lower(),
             [&](const auto& block, const Functor& functor, float of_tensor, bool writes_lower, bool streams, int64_t index) {
               rounds ? rounded_step_block(block, functor, of_tensor, rounding, index, writes_lower, streams)
                      : step_block(block, functor, of_tensor, writes_lower, streams);
             });
}

}  // namespace ampkit

#define AMPKIT_ON_DEVICE(op) op##_cpu
#define AMPKIT_RUN_STEP(Functor, ...) run_step<Functor>(__VA_ARGS__, AMPKIT_VARIANT(step_block<Functor>))
#define AMPKIT_RUN_ROUNDED_STEP(Functor, ...) \
  run_rounded_step<Functor>(__VA_ARGS__, AMPKIT_VARIANT(step_block<Functor>), AMPKIT_VARIANT(rounded_step_block<Functor>))
