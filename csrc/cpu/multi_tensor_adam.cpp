// multi_tensor_adam on the CPU: functors/multi_tensor_adam.h over the driver of cpu/multi_tensor_step.h.
#include "cpu/multi_tensor_step.h"
#include "functors/multi_tensor_adam.h"

#define AMPKIT_SOURCE "cpu/rounded_step_block.h"
#include "cpu/each_capability.h"
#include "steps/multi_tensor_adam.h"
