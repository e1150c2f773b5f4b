// multi_tensor_scale on the CPU. Memory traffic: each input read once, each output written once.
#ifdef AMPKIT_CAPABILITY

namespace ampkit {
namespace AMPKIT_CAPABILITY {

// Returns the highest magnitude of the inputs.
template <class In, class Out>
static int32_t scale_tile(const In* x, Out* out, int64_t n, ScaleFunctor functor) {
  int32_t highest = 0;
#pragma GCC ivdep  // out may be x itself, element for element
  for (int64_t i = 0; i < n; ++i) {
    const float value = widen(x[i]);
    const int32_t magnitude = magnitude_bits(value);
    highest = magnitude > highest ? magnitude : highest;
    narrow(functor(value), out[i]);
  }
  return highest;
}

template <class In>
static int32_t scale_tile(const In* x, const Sink& to, int64_t n, ScaleFunctor functor) {
  return to.is_bfloat16 ? scale_tile(x, static_cast<BFloat16*>(to.data), n, functor)
                        : scale_tile(x, static_cast<float*>(to.data), n, functor);
}

// Returns whether all inputs of the block are finite.
static bool scale_block(const Block<2>& block, ScaleFunctor functor, bool streams) {
  const FlatTensor<2>& tensor = *block.tensor;
  streams = streams && tensor.data[0] != tensor.data[1];
  TileBuffer in_buffer, out_buffer;
  int32_t highest = 0;
  for (int64_t start = 0; start < block.size; start += kTile) {
    const int64_t offset = block.offset + start;
    const int64_t n = block.size - start < kTile ? block.size - start : kTile;
    const Source from = source(tensor.data[0], tensor.dtype[0], offset, n, in_buffer);
    const Sink to = sink(tensor.data[1], tensor.dtype[1], offset, out_buffer, streams);
    const int32_t magnitude = from.is_bfloat16 ? scale_tile(static_cast<const BFloat16*>(from.data), to, n, functor)
                                               : scale_tile(static_cast<const float*>(from.data), to, n, functor);
    highest = magnitude > highest ? magnitude : highest;
    finish(to, tensor.data[1], tensor.dtype[1], offset, n, streams);
  }
  finish_streams(streams);
  return highest < kInfinityBits;
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
  TensorLists<2> lists(op, {{{"inputs", inputs, Role::kRead}, {"outputs", outputs, Role::kWrite}}});
  if (inputs.empty()) return;
  const Findings findings(op, found_inf, first_bad, inputs[0]);
  const ScaleFunctor functor(number(op, "scale", scale, scale_tensor, inputs[0]));
  const auto blocks = blocks_of(lists.flat());
  const bool streams = exceeds_caches(blocks);
  const auto scale_block = AMPKIT_VARIANT(scale_block);
  SharedFindings found;
  for_each_block(blocks, [&](int64_t i) {
    if (!scale_block(blocks[i], functor, streams)) found.report(blocks[i].tensor - lists.flat().data());
  });
  lists.finish();
  found.write(findings);
}

}  // namespace ampkit

#endif
