// multi_tensor_novograd on the CPU: functors/multi_tensor_novograd.h over the driver of cpu/multi_tensor_step.h.
#include "cpu/multi_tensor_step.h"
#include "functors/multi_tensor_novograd.h"

#define AMPKIT_SOURCE "cpu/step_block.h"
#include "cpu/each_capability.h"
#include "steps/multi_tensor_novograd.h"
