// The tensors of update_scale, checked.
#pragma once

#include "tensor_lists.h"

namespace ampkit {

struct ScaleArguments {
  float* scale;
  int32_t* growth_tracker;
  int32_t* hysteresis_tracker;
  const float* found_inf;

  ScaleArguments(const Tensor& scale, const Tensor& growth_tracker, const Tensor& hysteresis_tracker, const Tensor& found_inf)
      : scale(element_data<float>(kOp, "scale", scale, scale)),
        growth_tracker(element_data<int32_t>(kOp, "growth_tracker", growth_tracker, scale)),
        hysteresis_tracker(element_data<int32_t>(kOp, "hysteresis_tracker", hysteresis_tracker, scale)),
        found_inf(element_data<float>(kOp, "found_inf", found_inf, scale)) {}

 private:
  static constexpr const char* kOp = "update_scale";
};

}  // namespace ampkit
