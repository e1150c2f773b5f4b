// multi_tensor_novograd on CUDA: functors/multi_tensor_novograd.h over the driver of cuda/multi_tensor_step.cuh.
#include "cuda/multi_tensor_step.cuh"
#include "steps/multi_tensor_novograd.h"
