// multi_tensor_restore on the CPU. Memory traffic: both inputs read once, each output written once.
#ifdef AMPKIT_CAPABILITY
#include "cpu/rows.h"

namespace ampkit {
namespace AMPKIT_CAPABILITY {

template <bool kStreams>
static void restore_run(const Block<3>& block, RestoreFunctor functor) {
  const FlatTensor<3>& tensor = *block.tensor;
  const Any grads{tensor.data[0], tensor.dtype[0]}, exacts{tensor.data[1], tensor.dtype[1]}, outputs{tensor.data[2], tensor.dtype[2]};
  visit_pair(grads, exacts, outputs.dtype == DType::kFloat, [&](auto grad, auto exact) {
    const auto out = floats_beside(grad, outputs);
    for_each_row(block.offset, block.size, [&](int64_t i, int64_t count) AMPKIT_LAMBDA_INLINE {
      put_row<kStreams>(out, i, restored(functor, grad, exact, i, count), count);
    });
  });
  finish_streams(kStreams);
}

static void restore_block(const Block<3>& block, RestoreFunctor functor, bool streams) {
  const FlatTensor<3>& tensor = *block.tensor;
  streams = streams && can_stream(tensor.data[2], tensor.dtype[2], tensor.data[0]) && tensor.data[2] != tensor.data[1];
  streams ? restore_run<true>(block, functor) : restore_run<false>(block, functor);
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
