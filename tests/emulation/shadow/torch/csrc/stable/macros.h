// Torch's header, but for one macro: whether every launch is followed by its check.
#pragma once

#include_next <torch/csrc/stable/macros.h>

#include "threads.h"

#undef STD_CUDA_KERNEL_LAUNCH_CHECK
#define STD_CUDA_KERNEL_LAUNCH_CHECK() ::emulation::check_launch()
