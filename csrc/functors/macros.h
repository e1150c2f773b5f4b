// Macros with which the host compiler and nvcc compile the same functor.
#pragma once

#if defined(__CUDACC__)
#define AMPKIT_INLINE __host__ __device__ __forceinline__
#elif defined(__GNUC__)
// Always inlined: a functor is compiled for the instruction set of the kernel that calls it.
#define AMPKIT_INLINE inline __attribute__((always_inline))
#else
#define AMPKIT_INLINE inline
#endif

// A square root that vectorises: the C function may have to set errno, and that of <cmath> is a template.
#if defined(__GNUC__) && !defined(__CUDA_ARCH__)
#define AMPKIT_SQRT(x) __builtin_sqrtf(x)
#else
#include <math.h>
#define AMPKIT_SQRT(x) sqrtf(x)
#endif
