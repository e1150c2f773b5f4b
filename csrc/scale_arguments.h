// The tensors of update_scale, checked.
#pragma once

#include "functors/update_scale.h"
#include "tensor_lists.h"

namespace ampkit {

struct ScaleArguments {
  ScaleState* state;
  const float* found_inf;

  ScaleArguments(const Tensor& words, const Tensor& found_inf_)
      : state(static_cast<ScaleState*>(words.mutable_data_ptr())),
        found_inf(element_data<float>("update_scale", found_inf_, words)) {
    constexpr int64_t kWords = sizeof(ScaleState) / sizeof(int32_t);
    AMPKIT_CHECK(words.scalar_type() == torch::headeronly::ScalarType::Int && words.numel() == kWords && words.is_contiguous(),
                 "update_scale: state is no contiguous int32 tensor of shape [", kWords, "]");
    check_memory("update_scale", words);
  }
};

}  // namespace ampkit
