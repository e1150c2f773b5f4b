// multi_tensor_restore on the CPU. Memory traffic: both inputs read once, each output written once.
#ifdef AMPKIT_CAPABILITY

namespace ampkit {
namespace AMPKIT_CAPABILITY {

// For each element, how many of its run (see Note [runs]) differ. Blocks and tiles begin where runs do.
static const int32_t* changes_in_runs(const float* grad, const float* rounded, int64_t n, int32_t* changes) {
  int32_t any = 0;
  for (int64_t i = 0; i < n; ++i) any |= changes[i] = grad[i] != rounded[i];
  if (!any) return changes;  // as nearly always
  for (int64_t i = n; i % kRestoreRun != 0; ++i) changes[i] = 0;
  for (int64_t start = 0; start < n; start += kRestoreRun) {
    int32_t sum = 0;
    for (int k = 0; k < kRestoreRun; ++k) sum += changes[start + k];
    for (int k = 0; k < kRestoreRun; ++k) changes[start + k] = sum;
  }
  return changes;
}

static void restore_block(const Block<3>& block, RestoreFunctor functor, bool streams) {
  const FlatTensor<3>& tensor = *block.tensor;
  streams = streams && tensor.data[2] != tensor.data[0] && tensor.data[2] != tensor.data[1];
  TileBuffer grad_buffer, exact_buffer, out_buffer, unscaled, rounded_buffer, narrow;
  alignas(64) int32_t changes_buffer[kTile];
  for (int64_t start = 0; start < block.size; start += kTile) {
    const int64_t offset = block.offset + start;
    const int64_t n = block.size - start < kTile ? block.size - start : kTile;
    const float* grad = load(tensor.data[0], tensor.dtype[0], offset, n, grad_buffer);
    const float* exact = load(tensor.data[1], tensor.dtype[1], offset, n, exact_buffer);
    float* out = target(tensor.data[2], tensor.dtype[2], offset, out_buffer, streams);
    for (int64_t i = 0; i < n; ++i) unscaled.values[i] = functor.unscaled(exact[i]);
    store(unscaled.values, narrow.values, tensor.dtype[0], 0, n);
    const float* rounded = load(narrow.values, tensor.dtype[0], 0, n, rounded_buffer);
    const int32_t* changes = changes_in_runs(grad, rounded, n, changes_buffer);
#pragma GCC ivdep  // out may be an input itself, element for element
    for (int64_t i = 0; i < n; ++i) out[i] = functor(grad[i], exact[i], rounded[i], changes[i]);
    store(out, tensor.data[2], tensor.dtype[2], offset, n, streams);
  }
  finish_streams(streams);
}

}  // namespace AMPKIT_CAPABILITY
}  // namespace ampkit

#else

#include "cpu/multi_tensor_apply.h"
#include "functors/multi_tensor_restore.h"
#include "ops.h"

#define AMPKIT_SOURCE "cpu/multi_tensor_restore.cpp"
#include "cpu/each_capability.h"

namespace ampkit {

void multi_tensor_restore_cpu(const TensorList& grads, const TensorList& exacts, const TensorList& outputs, double inv_scale,
                              const MaybeTensor& inv_scale_tensor, double factor, const MaybeTensor& factor_tensor,
                              bool zeros_count) {
  constexpr const char* op = "multi_tensor_restore";
  TensorLists<3> lists(op, {{{"grads", grads, Role::kRead}, {"exacts", exacts, Role::kRead}, {"outputs", outputs, Role::kWrite}}});
  if (grads.empty()) return;
  const RestoreFunctor functor(number(op, "inv_scale", inv_scale, inv_scale_tensor, grads[0]),
                               number(op, "factor", factor, factor_tensor, grads[0]), zeros_count);
  const auto blocks = blocks_of(lists.flat());
  const bool streams = exceeds_caches(blocks);
  const auto restore_block = AMPKIT_VARIANT(restore_block);
  for_each_block(blocks, [&](int64_t i) { restore_block(blocks[i], functor, streams); });
  lists.finish();
}

}  // namespace ampkit

#endif
