// multi_tensor_scale on the CPU. Memory traffic: each input read once, each output written once.
#ifdef AMPKIT_CAPABILITY

namespace ampkit {
namespace AMPKIT_CAPABILITY {

// A copy does not multiply, like torch's: under torch.set_flush_denormal(True) a product would flush denormals.
struct Same {
  template <class Floats>
  AMPKIT_INLINE Floats operator()(Floats x) const {
    return x;
  }
};

// Returns whether all inputs are finite, if kChecks. out may be x itself, element for element.
template <bool kChecks, class In, class Out, class Functor>
static bool scale_run(const In* x, Out* out, int64_t n, Functor functor) {
  Words distances = {};
  for_each_vector(x, n, [&](int64_t i, Vector v, int64_t count) {
    if (kChecks) distances |= distance_to_itself(v);
    put(out + i, functor(v), count);
  });
  return are_zero(distances);
}

template <class Functor>
static bool map_block(const Block<2>& block, Functor functor, bool checks) {
  const FlatTensor<2>& tensor = *block.tensor;
  const int64_t n = block.size;
  return visit(tensor.data[0], tensor.dtype[0], block.offset, [&](const auto* x) {
    return visit(tensor.data[1], tensor.dtype[1], block.offset, [&](auto* out) {
      return checks ? scale_run<true>(x, out, n, functor) : scale_run<false>(x, out, n, functor);
    });
  });
}

static bool scale_block(const Block<2>& block, ScaleFunctor functor, bool copies, bool checks) {
  return copies ? map_block(block, Same(), checks) : map_block(block, functor, checks);
}

}  // namespace AMPKIT_CAPABILITY
}  // namespace ampkit

#else

#include "cpu/multi_tensor_apply.h"
#include "functors/multi_tensor_scale.h"
#include "ops.h"

#define AMPKIT_SOURCE "cpu/multi_tensor_scale.cpp"
#include "cpu/each_capability.h"

namespace ampkit {

void multi_tensor_scale_cpu(const TensorList& inputs, const TensorList& outputs, double scale, const MaybeTensor& scale_tensor,
                            const MaybeTensor& found_inf, const MaybeTensor& first_bad) {
  constexpr const char* op = "multi_tensor_scale";
  const TensorList& sources = inputs.empty() ? outputs : inputs;
  TensorLists<2> lists(op, {{{sources, Role::kRead}, {outputs, Role::kWrite}}});
  if (sources.empty()) return;
  const Findings findings(op, found_inf, first_bad, sources[0]);
  const ScaleFunctor functor(number(op, scale, scale_tensor, sources[0]));
  const auto blocks = blocks_of(lists.flat());
  const bool checks = findings.found_inf != nullptr || findings.first_bad != nullptr;
  const bool copies = !scale_tensor.has_value() && scale == 1.0;
  const auto scale_block = AMPKIT_VARIANT(scale_block);
  SharedFindings found;
  for_each_block(blocks, [&](int64_t i) {
    if (!scale_block(blocks[i], functor, copies, checks)) found.report(blocks[i].tensor - lists.flat().data());
  });
  found.write(findings);
}

}  // namespace ampkit

#endif
