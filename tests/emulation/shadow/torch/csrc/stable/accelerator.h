// Torch's header, but for the guard: on the host there is no device to choose. (On simulated devices there is.)
#pragma once

#ifdef SIMULATED_CUDA
#include_next <torch/csrc/stable/accelerator.h>
#else
#define DeviceGuard TorchsDeviceGuard
#include_next <torch/csrc/stable/accelerator.h>
#undef DeviceGuard

namespace torch::stable::accelerator {

class DeviceGuard {
 public:
  explicit DeviceGuard(DeviceIndex) {}
  ~DeviceGuard() {}
};

}  // namespace torch::stable::accelerator
#endif
