// Every operator of ampkit, on both devices: the page to open first.
//
// registration.cpp gives these functions their schemas under torch.ops.ampkit; cpu/<op>.cpp and cuda/<op>.cu hold the
// drivers; functors/<op>.h holds the arithmetic that both compile. ampkit/kernels/reference.py and reference_optimizers.py define
// each operator in plain torch, and explain its arguments.
//
// A number that may lie on the device is passed as a double and as an optional tensor, which takes precedence. Absent
// lists are passed as empty ones.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "tensor_list.h"

namespace ampkit {

using MaybeTensor = std::optional<Tensor>;

using TwoTensors = std::tuple<Tensor, Tensor>;

// All operators with a kernel on each device.
#define AMPKIT_OPERATORS(X)                                                                           \
  X(multi_tensor_scale) X(multi_tensor_axpby) X(multi_tensor_join) X(multi_tensor_split)              \
  X(multi_tensor_unscale_l2norm) X(multi_tensor_step) X(update_scale)

#define AMPKIT_DECLARE(Result, op, ...) \
  Result op##_cpu(__VA_ARGS__);         \
  Result op##_cuda(__VA_ARGS__)

// outputs[i] = inputs[i] * scale, in place without inputs; found_inf becomes 1 if an input is not finite, and first_bad the
// index of the first such input.
AMPKIT_DECLARE(void, multi_tensor_scale, const TensorList& inputs, const TensorList& outputs, double scale,
               const MaybeTensor& scale_tensor, const MaybeTensor& found_inf, const MaybeTensor& first_bad);

// outputs[i] = a * xs[i] + b * ys[i]; arg_to_check says what is checked: -1 both, 0 xs, 1 ys.
AMPKIT_DECLARE(void, multi_tensor_axpby, const TensorList& xs, const TensorList& ys, const TensorList& outputs, double a,
               const MaybeTensor& a_tensor, double b, const MaybeTensor& b_tensor, int64_t arg_to_check,
               const MaybeTensor& found_inf, const MaybeTensor& first_bad);

// outputs[i] = the float32 value that weights[i] and rests[i] are together, and back: functors/split.h.
AMPKIT_DECLARE(void, multi_tensor_join, const TensorList& weights, const TensorList& rests, const TensorList& outputs);
AMPKIT_DECLARE(void, multi_tensor_split, const TensorList& values, const TensorList& weights, const TensorList& rests);

// The Euclidean norm of all inputs * inv_scale together, float32 [1], and of each, float32 [n] ([0] unless per_tensor); outputs,
// if there are any, receive the products. Inputs are checked.
AMPKIT_DECLARE(TwoTensors, multi_tensor_unscale_l2norm, const TensorList& inputs, const TensorList& outputs, double inv_scale,
               const MaybeTensor& inv_scale_tensor, bool per_tensor, const MaybeTensor& found_inf, const MaybeTensor& first_bad);

// A step of an optimizer, by the rule of this name (step.h). written: the lists of parameters, of the rule's states and, if there
// is one, of lower. settings: lr, step, the gradients' factor, the seed's two halves, whether parameters are rounded by
// numbers drawn, and the rule's own. Gradients are multiplied by factor * inv_scale * clip; if found_inf is not 0, nothing is
// written. each: a number for each tensor, for the rule. With positions moments are rounded by numbers drawn: moments/rounding.h.
AMPKIT_DECLARE(void, multi_tensor_step, const std::string& rule, const TensorList& grads, const TensorList& written,
               const std::vector<double>& settings, const MaybeTensor& lr, const MaybeTensor& step, const MaybeTensor& inv_scale,
               const MaybeTensor& clip, const MaybeTensor& found_inf, const MaybeTensor& each, const MaybeTensor& positions);

// Moves a dynamic loss scale and its counters.
AMPKIT_DECLARE(void, update_scale, const Tensor& state, const Tensor& found_inf, double growth_factor, double backoff_factor,
               int64_t growth_interval, int64_t hysteresis, double min_scale, double max_scale);

// The instruction set of the CPU kernels: "avx512", "avx2" or "baseline".
std::string cpu_capability();

}  // namespace ampkit
