// multi_tensor_accumulate on the CPU. Memory traffic: all inputs read once, totals and gradients written once.
#ifdef AMPKIT_CAPABILITY
#include "cpu/rows.h"

namespace ampkit {
namespace AMPKIT_CAPABILITY {

// Returns whether all fresh gradients are finite.
template <bool kStreams>
static bool accumulate_run(const Block<4>& block, AccumulateFunctor functor) {
  const auto list = [&](int k) { return Any{block.tensor->data[k], block.tensor->dtype[k]}; };
  const bool is_usual = list(0).dtype == list(1).dtype && list(3).dtype == DType::kFloat;
  const bool finite = visit_pair(list(1), list(2), is_usual, [&](auto grad, auto exact) {
    const auto fresh = like(grad, list(0));
    const auto total = floats_beside(grad, list(3));
    Words distances = {};
    for_each_row(block.offset, block.size, [&](int64_t i, int64_t count) AMPKIT_LAMBDA_INLINE {
      const Row added = load_row(fresh, i, count);
      Row sum = restored(functor.restore, grad, exact, i, count);
      for (int v = 0; v < kVectors; ++v) {
        distances |= distance_to_itself(added.of[v]);
        sum.of[v] = functor(added.of[v], sum.of[v]);
      }
      put_row<false>(grad, i, sum, count);
      put_row<kStreams>(total, i, sum, count);
    });
    return are_zero(distances);
  });
  finish_streams(kStreams);
  return finite;
}

static bool accumulate_block(const Block<4>& block, AccumulateFunctor functor, bool streams) {
  const FlatTensor<4>& tensor = *block.tensor;
  streams = streams && can_stream(tensor.data[3], tensor.dtype[3], tensor.data[2]);
  return streams ? accumulate_run<true>(block, functor) : accumulate_run<false>(block, functor);
}

}  // namespace AMPKIT_CAPABILITY
}  // namespace ampkit

#else

#include "cpu/multi_tensor_apply.h"
#include "functors/multi_tensor_accumulate.h"
#include "ops.h"

#define AMPKIT_SOURCE "cpu/multi_tensor_accumulate.cpp"
#include "cpu/each_capability.h"

namespace ampkit {

void multi_tensor_accumulate_cpu(const TensorList& fresh, const TensorList& grads, const TensorList& exacts,
                                 const TensorList& totals, double inv_scale, const MaybeTensor& inv_scale_tensor,
                                 double exact_inv_scale, const MaybeTensor& exact_inv_scale_tensor, bool zeros_count,
                                 const MaybeTensor& found_inf, const MaybeTensor& first_bad) {
  constexpr const char* op = "multi_tensor_accumulate";
  TensorLists<4> lists(op, {{{"fresh", fresh, Role::kRead},
                             {"grads", grads, Role::kWrite},
                             {"exacts", exacts, Role::kRead},
                             {"totals", totals, Role::kWrite}}});
  if (fresh.empty()) return;
  const Findings findings(op, found_inf, first_bad, fresh[0]);
  const AccumulateFunctor functor(number(op, "inv_scale", inv_scale, inv_scale_tensor, fresh[0]),
                                  number(op, "exact_inv_scale", exact_inv_scale, exact_inv_scale_tensor, fresh[0]), zeros_count);
  const auto blocks = blocks_of(lists.flat());
  const bool streams = exceeds_caches(blocks);
  const auto accumulate_block = AMPKIT_VARIANT(accumulate_block);
  SharedFindings found;
  for_each_block(blocks, [&](int64_t i) {
    if (!accumulate_block(blocks[i], functor, streams)) found.report(blocks[i].tensor - lists.flat().data());
  });
  lists.finish();
  found.write(findings);
}

}  // namespace ampkit

#endif
