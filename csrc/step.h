// The arguments of multi_tensor_step in the form that the driver of a rule takes: Step<Functor>, the same on both devices.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "functors/multi_tensor_adagrad.h"
#include "functors/multi_tensor_lamb.h"
#include "functors/multi_tensor_novograd.h"
#include "functors/multi_tensor_sgd.h"
#include "moments/rounding.h"
#include "tensor_lists.h"

namespace ampkit {

// The arguments of the operator, which ops.h explains.
struct StepArguments {
  const TensorList &grads, &written;
  const std::vector<double>& settings;
  const MaybeTensor &lr, &step, &inv_scale, &clip, &found_inf, &each, &positions;
};

// The lists are gradients, parameters, states and lower, in this order. Without lower the parameters take its number, and are
// only read there.
template <class Functor_>
struct Step {
  using Functor = Functor_;
  using Settings = typename Functor::Settings;
  static constexpr int kStates = Functor::kStates, kDepth = kStates + 3, kParams = 1, kLower = kStates + 2;
  static constexpr int kCommon = 6;  // of the settings, before those of the rule

  bool writes_lower;
  TensorLists<kDepth> lists;
  Settings settings;
  const float* each;  // a number for each tensor, or nullptr
  Rounding rounding;

  explicit Step(const StepArguments& given)
      : writes_lower(given.written.size() == (kStates + 2) * given.grads.size()),
        lists(Functor::kRule, columns_of(given, writes_lower)) {
    constexpr const char* op = Functor::kRule;
    AMPKIT_CHECK(given.settings.size() == kCommon + Settings::kCount, op, ": ", given.settings.size(), " settings");
    const TensorView beside = given.grads[0];
    const double* values = given.settings.data();
    settings.lr = number(op, values[0], given.lr, beside);
    settings.step = number(op, values[1], given.step, beside);
    settings.factor = static_cast<float>(values[2]);
    settings.inv_scale = element_data<float>(op, given.inv_scale, beside);
    settings.clip = element_data<float>(op, given.clip, beside);
    settings.found_inf = element_data<float>(op, given.found_inf, beside);
    std::copy_n(values + kCommon, Settings::kCount, settings.own);
    for (int k = 0; k < std::min(2, Settings::kCount); ++k) settings.log_betas[k] = std::log(settings.own[k]);
    each = vector_data(op, given.each, given.grads);
    const uint64_t seed = static_cast<uint64_t>(values[3]) | static_cast<uint64_t>(values[4]) << 32;
    rounding = {vector_data(op, given.positions, given.grads), settings.step, seed, values[5] != 0};
    for (const auto& tensor : lists.flat()) {
      AMPKIT_CHECK(!is_rest(tensor.dtype[kLower]) || tensor.dtype[kParams] != DType::kFloat, op,
                   ": a rest beside a float32 parameter");
      // The second pass would compute other directions than the first, from moments that were rounded in between.
      for (int k = kParams + 1; Functor::kSumsSquares && k < kLower; ++k)
        AMPKIT_CHECK(tensor.dtype[k] == DType::kFloat, op, ": moments in lower precision");
    }
  }

 private:
  static std::array<Column, kDepth> columns_of(const StepArguments& given, bool writes_lower) {
    const size_t count = given.grads.size();
    AMPKIT_CHECK(count > 0 && (writes_lower || given.written.size() == (kStates + 1) * count), Functor::kRule, ": ", count,
                 " gradients, and ", given.written.size(), " tensors to be written");
    const Role of_states = Functor::kTakesRests ? Role::kMoment : Role::kWrite;
    const Role of_lower = Functor::kTakesRests ? Role::kWriteOrRest : Role::kWrite;
    std::array<Column, kDepth> columns;
    columns[0] = {&given.grads, Role::kRead, 0, count};
    for (int k = 1; k < kDepth; ++k)
      columns[k] = {&given.written, k == kParams ? Role::kWrite : of_states, (k - 1) * count, count};
    columns[kLower] = {&given.written, Role::kRead, 0, count};
    if (writes_lower) columns[kLower] = {&given.written, of_lower, (kLower - 1) * count, count};
    return columns;
  }
};

// A row is a functor: kRule is its name, kStates the number of state lists, Settings::kCount that of settings beyond kCommon.
template <class... Functors>
struct RuleTable {
  // Calls take(step) with the Step of the rule of this name.
  template <class Take>
  static void find(const std::string& rule, const StepArguments& given, const Take& take) {
    const bool is_known = ((rule == Functors::kRule && (take(Step<Functors>(given)), true)) || ...);
    AMPKIT_CHECK(is_known, "multi_tensor_step: there is no rule ", rule);
  }
};

using Rules = RuleTable<SgdFunctor<false>, SgdFunctor<true>, AdamFunctor, AdagradFunctor, NovogradFunctor, LambFunctor>;

}  // namespace ampkit
