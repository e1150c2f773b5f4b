// multi_tensor_adagrad on CUDA: functors/multi_tensor_adagrad.h over the driver of cuda/multi_tensor_step.cuh.
#include "cuda/multi_tensor_step.cuh"
#include "steps/multi_tensor_adagrad.h"
