// Compiles the kernels of one source file once per instruction set. Without an include guard, on purpose.
//
// A kernel source defines AMPKIT_SOURCE as its own name and includes this file, which includes the source back for
// AVX-512, AVX2 and a baseline, each time with AMPKIT_CAPABILITY naming the namespace to use. The kernels
// are plain loops; only the compiler's output differs. AMPKIT_VARIANT(kernel) picks a variant at run time.
//
// Note [no templates of others in kernels]: a function template instantiated inside these regions is compiled for the
// region's instruction set, and the linker may keep that copy for the whole program. So the regions hold only
// functions of ampkit's namespaces, and nothing from the standard library.
#include <cstdint>

#include "cpu/capability.h"
#include "functors/finite.h"
#include "functors/multi_tensor_l2norm.h"
#include "functors/split.h"
#include "tensor_lists.h"

#if AMPKIT_X86_VARIANTS

#define AMPKIT_CAPABILITY avx512
#define AMPKIT_LANES 16
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#include "cpu/tiles.h"
#include AMPKIT_SOURCE
#pragma GCC pop_options
#undef AMPKIT_CAPABILITY
#undef AMPKIT_LANES

#define AMPKIT_CAPABILITY avx2
#define AMPKIT_LANES 8
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#include "cpu/tiles.h"
#include AMPKIT_SOURCE
#pragma GCC pop_options
#undef AMPKIT_CAPABILITY
#undef AMPKIT_LANES

#endif

#define AMPKIT_CAPABILITY baseline
#define AMPKIT_LANES 4
#include "cpu/tiles.h"
#include AMPKIT_SOURCE
#undef AMPKIT_CAPABILITY
#undef AMPKIT_LANES
