// CUDA's header of this name does not come with torch's wheels. For the host:
#pragma once
#define __host__
#define __device__
#define __global__
#define __inline__ inline
#define __forceinline__ inline
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __align__(n) __attribute__((aligned(n)))
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define CUDARTAPI
#define CUDART_CB
#define CUDARTAPI_CDECL
