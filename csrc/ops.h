// Every operator of ampkit, on both devices: the page to open first.
//
// registration.cpp gives these functions their schemas under torch.ops.ampkit; cpu/<op>.cpp and cuda/<op>.cu hold the
// drivers; functors/<op>.h holds the arithmetic that both compile. ampkit/kernels/reference.py says in plain torch
// what each of them means.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace ampkit {

using torch::stable::Tensor;
using TensorList = std::vector<Tensor>;

// outputs[i] = inputs[i] * scale; found_inf becomes 1 if an input is not finite.
void multi_tensor_scale_cpu(const TensorList& inputs, const TensorList& outputs, double scale,
                            const std::optional<Tensor>& found_inf);
void multi_tensor_scale_cuda(const TensorList& inputs, const TensorList& outputs, double scale,
                             const std::optional<Tensor>& found_inf);

// outputs[i] = a * xs[i] + b * ys[i]; arg_to_check says who is checked: -1 both, 0 xs, 1 ys.
void multi_tensor_axpby_cpu(const TensorList& xs, const TensorList& ys, const TensorList& outputs, double a, double b,
                            const std::optional<Tensor>& found_inf, int64_t arg_to_check);
void multi_tensor_axpby_cuda(const TensorList& xs, const TensorList& ys, const TensorList& outputs, double a, double b,
                             const std::optional<Tensor>& found_inf, int64_t arg_to_check);

// The Euclidean norm of all tensors together, float32 [1], and of each, float32 [n] ([0] when not asked for).
std::tuple<Tensor, Tensor> multi_tensor_l2norm_cpu(const TensorList& tensors, bool per_tensor);
std::tuple<Tensor, Tensor> multi_tensor_l2norm_cuda(const TensorList& tensors, bool per_tensor);

// The CUDA driver's host side, laid open so that machines without a GPU can test it: one row per block,
// (launch, tensor, slot, chunk), int64.
Tensor plan_launches(std::vector<int64_t> sizes, int64_t chunk_size, int64_t max_tensors, int64_t max_blocks);

// The instruction set that the CPU kernels run with: "avx512", "avx2" or "baseline".
std::string cpu_capability();

}  // namespace ampkit
