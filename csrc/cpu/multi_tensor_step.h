// What cpu/multi_tensor_step.cpp calls for a rule that has a driver of its own.
#pragma once

#include "cpu/multi_tensor_apply.h"
#include "step.h"

namespace ampkit {

void take_lamb_step(Step<LambFunctor>& step);

}  // namespace ampkit
