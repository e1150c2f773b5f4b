// The lists of an optimizer's step, in the order in which every driver numbers them: gradients, parameters, states, lower.
//
// What the host does for a step stands once for both devices, in steps/<op>.h. The CPU's and CUDA's headers of the same name,
// multi_tensor_step, say what its AMPKIT_ON_DEVICE(op) is called and how AMPKIT_RUN_STEP(Functor, lists, settings, each) runs.
#pragma once

#include <array>
#include <utility>

#include "functors/multi_tensor_step.h"
#include "functors/rounding.h"
#include "tensor_lists.h"

namespace ampkit {

template <int kStates>
struct StepLists {
  static constexpr int kDepth = kStates + 3;
  static constexpr int kGrads = 0, kParams = 1, kLower = kStates + 2;

  const char* op;
  const TensorList& grads;
  const TensorList& params;
  std::array<NamedList, kStates> states;
  const TensorList& lower;  // empty: nobody asked

  // Where there is no lower, the parameters stand in, and are not touched under that number.
  bool writes_lower() const { return !lower.empty(); }
  // takes_rests: in the place of lower, see Note [weights and rests].
  TensorLists<kDepth> flatten(bool takes_rests) const {
    auto lists = flatten(takes_rests ? Role::kWriteOrRest : Role::kWrite, std::make_index_sequence<kStates>());
    if (takes_rests) {
      const auto& tensors = lists.flat();
      for (size_t i = 0; i < tensors.size(); ++i)
        AMPKIT_CHECK(!is_rest(tensors[i].dtype[kLower]) || tensors[i].dtype[kParams] != DType::kFloat, op, ": lower[", i,
                     "] is the rest of a weight, and params[", i, "] is Float; expected Half or BFloat16");
    }
    return lists;
  }

 private:
  template <size_t... kState>
  TensorLists<kDepth> flatten(Role role, std::index_sequence<kState...>) const {
    const NamedList last{"lower", writes_lower() ? lower : params, writes_lower() ? role : Role::kRead};
    return {op, {{{"grads", grads, Role::kRead}, {"params", params, Role::kWrite}, states[kState]..., last}}};
  }
};

// How a step rounds what it writes, where positions are given: moments by numbers drawn, and parameters too if that is asked for.
inline Rounding rounding_of(const char* op, const TensorList& grads, const MaybeTensor& positions, Number step, int64_t seed,
                            bool round_params) {
  return {vector_data(op, "positions", positions, grads), step, static_cast<uint64_t>(seed), round_params};
}

inline StepSettings step_settings(const char* op, const TensorList& grads, double lr, const MaybeTensor& lr_tensor,
                                  double factor, const MaybeTensor& inv_scale, const MaybeTensor& clip,
                                  const MaybeTensor& found_inf) {
  AMPKIT_CHECK(!grads.empty(), op, ": grads is empty");
  const TensorView beside = grads[0];
  return {number(op, "lr", lr, lr_tensor, beside), static_cast<float>(factor),
          element_data<float>(op, "inv_scale", inv_scale, beside), element_data<float>(op, "clip", clip, beside),
          element_data<float>(op, "found_inf", found_inf, beside)};
}

// LAMB's lists: 0 gradients, 1 parameters, 2 and 3 moments, 4 lower, 5 directions.
inline TensorLists<6> lamb_lists(const char* op, const TensorList& grads, const TensorList& params, const TensorList& exp_avgs,
                                 const TensorList& exp_avg_sqs, const TensorList& lower, const TensorList& directions) {
  const auto optional = [&](const char* name, const TensorList& list) {
    return list.empty() ? NamedList{name, params, Role::kRead} : NamedList{name, list, Role::kWrite};
  };
  return {op,
          {{{"grads", grads, Role::kRead},
            {"params", params, Role::kWrite},
            {"exp_avgs", exp_avgs, Role::kWrite},
            {"exp_avg_sqs", exp_avg_sqs, Role::kWrite},
            optional("lower", lower),
            optional("directions", directions)}}};
}

}  // namespace ampkit
