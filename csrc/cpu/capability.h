// The instruction set of the CPU kernels, chosen once per process.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define AMPKIT_X86_VARIANTS 1
#include <immintrin.h>
#else
#define AMPKIT_X86_VARIANTS 0
#endif

namespace ampkit {

enum class Capability { kBaseline, kAvx2, kAvx512 };

// The processor's, or a lower one if the environment variable AMPKIT_CPU_CAPABILITY (baseline, avx2, avx512) says so.
Capability capability();

// AMPKIT_VARIANT(kernel), or (kernel<arguments>): the function of this name that was compiled for capability(). See cpu/each_capability.h.
#if AMPKIT_X86_VARIANTS
template <class Function>
Function choose(Function baseline, Function avx2, Function avx512) {
  switch (capability()) {
    case Capability::kAvx512: return avx512;
    case Capability::kAvx2: return avx2;
    default: return baseline;
  }
}
#define AMPKIT_VARIANT(...) ::ampkit::choose(&baseline::__VA_ARGS__, &avx2::__VA_ARGS__, &avx512::__VA_ARGS__)
#else
#define AMPKIT_VARIANT(...) (&baseline::__VA_ARGS__)
#endif

}  // namespace ampkit
