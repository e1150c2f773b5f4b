// run_step: cpu/step_block.h over lists of tensors, with the block of a functor for the instruction set at hand.
#pragma once

#include "cpu/multi_tensor_apply.h"
#include "step_lists.h"

namespace ampkit {

template <class Functor, class StepBlock>
void run_step(const StepLists<Functor::kStates>& step_lists, const typename Functor::Settings& settings, const float* each,
              StepBlock step_block) {
  auto lists = step_lists.flatten(Functor::kTakesRests);
  if (settings.common.skips()) return;
  const Functor functor(settings);
  const auto& tensors = lists.flat();
  const auto blocks = blocks_of(tensors);
  const bool writes_lower = step_lists.writes_lower(), streams = exceeds_caches(blocks);
  for_each_block(blocks, [&](int64_t i) {
    const float of_tensor = each == nullptr ? 1.0f : each[blocks[i].tensor - tensors.data()];
    step_block(blocks[i], functor, of_tensor, writes_lower, streams);
  });
  lists.finish();
}

}  // namespace ampkit

#define AMPKIT_ON_DEVICE(op) op##_cpu
#define AMPKIT_RUN_STEP(Functor, ...) run_step<Functor>(__VA_ARGS__, AMPKIT_VARIANT(step_block<Functor>))
