// Every operator of ampkit, on both devices: the page to open first.
//
// registration.cpp gives these functions their schemas under torch.ops.ampkit; cpu/<op>.cpp and cuda/<op>.cu hold the
// drivers; functors/<op>.h holds the arithmetic that both compile. ampkit/kernels/reference.py and reference_optimizers.py say in
// plain torch what each of them means, and what the arguments are.
//
// A number that may lie on the device comes twice, as a double and as an optional tensor, which goes first. Empty lists
// stand for lists that are absent: outputs, momenta, lower, directions.
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

// outputs[i] = inputs[i] * scale, in place without inputs; found_inf becomes 1 if an input is not finite, first_bad the first
// such index.
void multi_tensor_scale_cpu(const TensorList& inputs, const TensorList& outputs, double scale, const MaybeTensor& scale_tensor,
                            const MaybeTensor& found_inf, const MaybeTensor& first_bad);
void multi_tensor_scale_cuda(const TensorList& inputs, const TensorList& outputs, double scale,
                             const MaybeTensor& scale_tensor, const MaybeTensor& found_inf, const MaybeTensor& first_bad);

// outputs[i] = a * xs[i] + b * ys[i]; arg_to_check says who is checked: -1 both, 0 xs, 1 ys.
void multi_tensor_axpby_cpu(const TensorList& xs, const TensorList& ys, const TensorList& outputs, double a,
                            const MaybeTensor& a_tensor, double b, const MaybeTensor& b_tensor, const MaybeTensor& found_inf,
                            int64_t arg_to_check, const MaybeTensor& first_bad);
void multi_tensor_axpby_cuda(const TensorList& xs, const TensorList& ys, const TensorList& outputs, double a,
                             const MaybeTensor& a_tensor, double b, const MaybeTensor& b_tensor, const MaybeTensor& found_inf,
                             int64_t arg_to_check, const MaybeTensor& first_bad);

// outputs[i] = the float32 value that weights[i] and rests[i] are together, and back: functors/split.h.
void multi_tensor_join_cpu(const TensorList& weights, const TensorList& rests, const TensorList& outputs);
void multi_tensor_join_cuda(const TensorList& weights, const TensorList& rests, const TensorList& outputs);
void multi_tensor_split_cpu(const TensorList& values, const TensorList& weights, const TensorList& rests);
void multi_tensor_split_cuda(const TensorList& values, const TensorList& weights, const TensorList& rests);

// The Euclidean norm of all inputs * inv_scale together, float32 [1], and of each, float32 [n] ([0] when not asked for); outputs,
// if there are any, receive the products. Inputs are checked.
std::tuple<Tensor, Tensor> multi_tensor_unscale_l2norm_cpu(const TensorList& inputs, const TensorList& outputs,
                                                           double inv_scale, const MaybeTensor& inv_scale_tensor,
                                                           const MaybeTensor& found_inf, bool per_tensor,
                                                           const MaybeTensor& first_bad);
std::tuple<Tensor, Tensor> multi_tensor_unscale_l2norm_cuda(const TensorList& inputs, const TensorList& outputs,
                                                            double inv_scale, const MaybeTensor& inv_scale_tensor,
                                                            const MaybeTensor& found_inf, bool per_tensor,
                                                            const MaybeTensor& first_bad);

// The optimizers' steps: gradients times factor * inv_scale * clip; nothing is written where found_inf is not 0.
// Steps of SGD and Adam with positions round moments by numbers drawn, and with round_params parameters too: functors/rounding.h.
void multi_tensor_sgd_cpu(const TensorList& grads, const TensorList& params, const TensorList& momenta, const TensorList& lower,
                          double lr, const MaybeTensor& lr_tensor, double momentum, double dampening, double weight_decay,
                          bool nesterov, bool first_run, bool wd_after_momentum, const MaybeTensor& trust, double factor,
                          const MaybeTensor& inv_scale, const MaybeTensor& clip, const MaybeTensor& found_inf, double step,
                          const MaybeTensor& step_tensor, const MaybeTensor& positions, int64_t seed, bool round_params);
void multi_tensor_sgd_cuda(const TensorList& grads, const TensorList& params, const TensorList& momenta,
                           const TensorList& lower, double lr, const MaybeTensor& lr_tensor, double momentum, double dampening,
                           double weight_decay, bool nesterov, bool first_run, bool wd_after_momentum, const MaybeTensor& trust,
                           double factor, const MaybeTensor& inv_scale, const MaybeTensor& clip, const MaybeTensor& found_inf, double step,
                           const MaybeTensor& step_tensor, const MaybeTensor& positions, int64_t seed, bool round_params);

void multi_tensor_adam_cpu(const TensorList& grads, const TensorList& params, const TensorList& exp_avgs,
                           const TensorList& exp_avg_sqs, const TensorList& lower, double lr, const MaybeTensor& lr_tensor,
                           double beta1, double beta2, double eps, double step, const MaybeTensor& step_tensor, bool decoupled,
                           bool bias_correction, double weight_decay, double factor, const MaybeTensor& inv_scale,
                           const MaybeTensor& clip, const MaybeTensor& found_inf, const MaybeTensor& positions,
                           int64_t seed, bool round_params);
void multi_tensor_adam_cuda(const TensorList& grads, const TensorList& params, const TensorList& exp_avgs,
                            const TensorList& exp_avg_sqs, const TensorList& lower, double lr, const MaybeTensor& lr_tensor,
                            double beta1, double beta2, double eps, double step, const MaybeTensor& step_tensor, bool decoupled,
                            bool bias_correction, double weight_decay, double factor, const MaybeTensor& inv_scale,
                            const MaybeTensor& clip, const MaybeTensor& found_inf, const MaybeTensor& positions,
                            int64_t seed, bool round_params);

void multi_tensor_adagrad_cpu(const TensorList& grads, const TensorList& params, const TensorList& sums,
                              const TensorList& lower, double lr, const MaybeTensor& lr_tensor, double eps, bool decoupled,
                              double weight_decay, double factor, const MaybeTensor& inv_scale, const MaybeTensor& clip,
                              const MaybeTensor& found_inf);
void multi_tensor_adagrad_cuda(const TensorList& grads, const TensorList& params, const TensorList& sums,
                               const TensorList& lower, double lr, const MaybeTensor& lr_tensor, double eps, bool decoupled,
                               double weight_decay, double factor, const MaybeTensor& inv_scale, const MaybeTensor& clip,
                               const MaybeTensor& found_inf);

// norms are the running norms of the gradients, already moved by this step's.
void multi_tensor_novograd_cpu(const TensorList& grads, const TensorList& params, const TensorList& exp_avgs,
                               const Tensor& norms, const TensorList& lower, double lr, const MaybeTensor& lr_tensor,
                               double beta1, double beta2, double eps, double step, const MaybeTensor& step_tensor,
                               bool bias_correction, double weight_decay, bool grad_averaging, bool reg_inside_moment,
                               double factor, const MaybeTensor& inv_scale, const MaybeTensor& clip,
                               const MaybeTensor& found_inf);
void multi_tensor_novograd_cuda(const TensorList& grads, const TensorList& params, const TensorList& exp_avgs,
                                const Tensor& norms, const TensorList& lower, double lr, const MaybeTensor& lr_tensor,
                                double beta1, double beta2, double eps, double step, const MaybeTensor& step_tensor,
                                bool bias_correction, double weight_decay, bool grad_averaging, bool reg_inside_moment,
                                double factor, const MaybeTensor& inv_scale, const MaybeTensor& clip,
                                const MaybeTensor& found_inf);

void multi_tensor_lamb_cpu(const TensorList& grads, const TensorList& params, const TensorList& exp_avgs,
                           const TensorList& exp_avg_sqs, const TensorList& lower, const TensorList& directions, double lr,
                           const MaybeTensor& lr_tensor, double beta1, double beta2, double eps, double step,
                           const MaybeTensor& step_tensor, double weight_decay, bool decoupled, bool bias_correction,
                           bool grad_averaging, bool trusts, double factor, const MaybeTensor& inv_scale,
                           const MaybeTensor& clip, const MaybeTensor& found_inf);
void multi_tensor_lamb_cuda(const TensorList& grads, const TensorList& params, const TensorList& exp_avgs,
                            const TensorList& exp_avg_sqs, const TensorList& lower, const TensorList& directions, double lr,
                            const MaybeTensor& lr_tensor, double beta1, double beta2, double eps, double step,
                            const MaybeTensor& step_tensor, double weight_decay, bool decoupled, bool bias_correction,
                            bool grad_averaging, bool trusts, double factor, const MaybeTensor& inv_scale,
                            const MaybeTensor& clip, const MaybeTensor& found_inf);

// Moves a dynamic loss scale and its counters.
void update_scale_cpu(const Tensor& state, const Tensor& found_inf, double growth_factor, double backoff_factor,
                      int64_t growth_interval, int64_t hysteresis, double min_scale, double max_scale);
void update_scale_cuda(const Tensor& state, const Tensor& found_inf, double growth_factor, double backoff_factor,
                       int64_t growth_interval, int64_t hysteresis, double min_scale, double max_scale);

// The CUDA driver's host side, laid open so that machines without a GPU can test it: one row per block,
// (launch, tensor, slot, chunk), int64.
Tensor plan_launches(std::vector<int64_t> sizes, int64_t chunk_size, int64_t max_tensors);

// The instruction set that the CPU kernels run with: "avx512", "avx2" or "baseline".
std::string cpu_capability();

}  // namespace ampkit
