// multi_tensor_adam on CUDA: functors/multi_tensor_adam.h over the drivers of cuda/multi_tensor_step.cuh and rounded_step.cuh.
#include "cuda/rounded_step.cuh"
#include "steps/multi_tensor_adam.h"
