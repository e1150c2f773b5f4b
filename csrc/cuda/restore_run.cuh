// What stays exact of a run of elements (functors/multi_tensor_restore.h), which is what a thread handles at a time.
#pragma once

#include "cuda/multi_tensor_apply.cuh"
#include "functors/multi_tensor_restore.h"

namespace ampkit {

static_assert(kWidth == kRestoreRun, "a thread sees one run at a time");

// Beyond the end all is zero.
__device__ inline void restore_run(const RestoreFunctor& functor, const float (&grad)[kWidth], const float (&exact)[kWidth],
                                   DType dtype, float (&out)[kWidth]) {
  uint32_t changed = 0;
#pragma unroll
  for (int k = 0; k < kWidth; ++k)
    changed |= static_cast<uint32_t>(grad[k] != rounded(functor.unscaled(exact[k]), dtype)) << k;
  const uint32_t written = functor.written(changed);
#pragma unroll
  for (int k = 0; k < kWidth; ++k) out[k] = functor(grad[k], exact[k], (written >> k & 1) != 0);
}

}  // namespace ampkit
