// multi_tensor_sgd on the CPU: functors/multi_tensor_sgd.h over the driver of cpu/multi_tensor_step.h.
#include "cpu/multi_tensor_step.h"
#include "functors/multi_tensor_sgd.h"

#define AMPKIT_SOURCE "cpu/rounded_step_block.h"
#include "cpu/each_capability.h"
#include "steps/multi_tensor_sgd.h"
