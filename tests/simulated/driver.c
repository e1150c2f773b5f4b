/* In the place of libcuda.so.1, of which torch asks little: whether a device is in use. */
int simulated_is_used(int device);
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  *flags = 0;
  *active = simulated_is_used(device);
  return 0;
}
#define NOT_SUPPORTED(name) int name(void) { return 801; }
NOT_SUPPORTED(cuCtxGetCurrent) NOT_SUPPORTED(cuCtxSetCurrent) NOT_SUPPORTED(cuDeviceGet) NOT_SUPPORTED(cuDeviceGetAttribute)
NOT_SUPPORTED(cuDevicePrimaryCtxRetain) NOT_SUPPORTED(cuFuncGetAttribute) NOT_SUPPORTED(cuFuncSetAttribute)
NOT_SUPPORTED(cuFuncSetCacheConfig) NOT_SUPPORTED(cuGetErrorString) NOT_SUPPORTED(cuLaunchCooperativeKernel)
NOT_SUPPORTED(cuLaunchKernel) NOT_SUPPORTED(cuLinkAddData_v2) NOT_SUPPORTED(cuLinkComplete) NOT_SUPPORTED(cuLinkCreate_v2)
NOT_SUPPORTED(cuModuleGetFunction) NOT_SUPPORTED(cuModuleLoad) NOT_SUPPORTED(cuModuleLoadData) NOT_SUPPORTED(cuModuleLoadDataEx)
NOT_SUPPORTED(cuModuleUnload) NOT_SUPPORTED(cuOccupancyMaxActiveBlocksPerMultiprocessor) NOT_SUPPORTED(cuPointerGetAttribute)
NOT_SUPPORTED(cuTensorMapEncodeTiled)
