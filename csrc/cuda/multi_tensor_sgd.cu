// multi_tensor_sgd on CUDA: functors/multi_tensor_sgd.h over the driver of cuda/multi_tensor_step.cuh.
#include "cuda/multi_tensor_step.cuh"
#include "steps/multi_tensor_sgd.h"
