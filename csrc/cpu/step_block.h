// step_block: the kernel of every optimizer's step, over any functor of functors/multi_tensor_step.h. Included once per
// instruction set, by cpu/each_capability.h.
//
// Memory traffic: gradients read once, parameters and states read and written once, lower written once (streamed).
namespace ampkit {
namespace AMPKIT_CAPABILITY {

template <class Functor>
static void step_block(const Block<Functor::kStates + 3>& block, Functor functor, float each, bool writes_lower, bool streams) {
  constexpr int kStates = Functor::kStates, kLower = kStates + 2;
  const FlatTensor<kStates + 3>& tensor = *block.tensor;
  const auto data = tensor.data;
  const auto dtype = tensor.dtype;
  const float of_tensor = functor.each(each);
  TileBuffer g_buffer, p_buffer, a_buffer, b_buffer;
  for (int64_t start = 0; start < block.size; start += kTile) {
    const int64_t offset = block.offset + start;
    const int64_t n = block.size - start < kTile ? block.size - start : kTile;
    const float* g = load(data[0], dtype[0], offset, n, g_buffer);
    float* p = edit(data[1], dtype[1], offset, n, p_buffer);
    float* a = kStates > 0 ? edit(data[2], dtype[2], offset, n, a_buffer) : nullptr;
    float* b = kStates > 1 ? edit(data[3], dtype[3], offset, n, b_buffer) : nullptr;
#pragma GCC ivdep  // lists do not overlap, except element for element
    for (int64_t i = 0; i < n; ++i) {
      float param = p[i], state = 0, second_state = 0;
      if (kStates > 0) state = a[i];
      if (kStates > 1) second_state = b[i];
      functor(g[i], param, state, second_state, of_tensor);
      p[i] = param;
      if (kStates > 0) a[i] = state;
      if (kStates > 1) b[i] = second_state;
    }
    store(p, data[1], dtype[1], offset, n);
    if (kStates > 0) store(a, data[2], dtype[2], offset, n);
    if (kStates > 1) store(b, data[3], dtype[3], offset, n);
    if (writes_lower) store(p, data[kLower], dtype[kLower], offset, n, streams);
  }
  finish_streams(writes_lower && streams);
}

}  // namespace AMPKIT_CAPABILITY
}  // namespace ampkit
