// In the place of torch's header: whether every launch is followed by its check.
#pragma once

#include "threads.h"

#define STD_CUDA_KERNEL_LAUNCH_CHECK() ::emulation::check_launch()
