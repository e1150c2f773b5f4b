// multi_tensor_restore on the CPU. Memory traffic: both inputs read once, each output written once.
#ifdef AMPKIT_CAPABILITY

namespace ampkit {
namespace AMPKIT_CAPABILITY {

static void restore_block(const Block<3>& block, RestoreFunctor functor, bool streams) {
  const FlatTensor<3>& tensor = *block.tensor;
  streams = streams && tensor.data[2] != tensor.data[0] && tensor.data[2] != tensor.data[1];
  TileBuffer grad_buffer, exact_buffer, out_buffer, unscaled, rounded_buffer, narrow;
  for (int64_t start = 0; start < block.size; start += kTile) {
    const int64_t offset = block.offset + start;
    const int64_t n = block.size - start < kTile ? block.size - start : kTile;
    const float* grad = load(tensor.data[0], tensor.dtype[0], offset, n, grad_buffer);
    const float* exact = load(tensor.data[1], tensor.dtype[1], offset, n, exact_buffer);
    float* out = target(tensor.data[2], tensor.dtype[2], offset, out_buffer, streams);
    for (int64_t i = 0; i < n; ++i) unscaled.values[i] = functor.unscaled(exact[i]);
    store(unscaled.values, narrow.values, tensor.dtype[0], 0, n);
    const float* rounded = load(narrow.values, tensor.dtype[0], 0, n, rounded_buffer);
#pragma GCC ivdep  // out may be an input itself, element for element
    for (int64_t i = 0; i < n; ++i) out[i] = functor(grad[i], exact[i], rounded[i]);
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
