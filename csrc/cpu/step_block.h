// step_block: the kernel of every optimizer's step, over any functor of functors/multi_tensor_step.h. Included once per
// instruction set, by cpu/each_capability.h.
//
// Memory traffic: gradients read once, parameters and states read and written once, lower written once (streamed), or, where it
// holds rests (Note [weights and rests]), read and written once.
namespace ampkit {
namespace AMPKIT_CAPABILITY {

// lower is bfloat16 where the loop writes it itself, and nullptr where it does not.
template <bool kWritesLower, class Grad, class Functor>
static void step_tile(const Grad* g, float* p, float* a, float* b, BFloat16* lower, int64_t n, Functor functor, float of_tensor) {
#pragma GCC ivdep  // lists do not overlap, except element for element
  for (int64_t i = 0; i < n; ++i) {
    float param = p[i], state = 0, second_state = 0;
    if (Functor::kStates > 0) state = a[i];
    if (Functor::kStates > 1) second_state = b[i];
    functor(widen(g[i]), param, state, second_state, of_tensor);
    p[i] = param;
    if (Functor::kStates > 0) a[i] = state;
    if (Functor::kStates > 1) b[i] = second_state;
    if (kWritesLower) narrow(param, lower[i]);
  }
}

// A tile of parameters and rests as one list of float32, and back; dtype is that of the parameters.
static float* edit_split(void* weights, void* rests, DType dtype, int64_t offset, int64_t n, TileBuffer& buffer) {
  join_tile(weights, rests, dtype, offset, buffer.values, n);
  return buffer.values;
}

template <class Functor>
static void step_block(const Block<Functor::kStates + 3>& block, Functor functor, float each, bool writes_lower, bool streams) {
  constexpr int kStates = Functor::kStates, kLower = kStates + 2;
  const FlatTensor<kStates + 3>& tensor = *block.tensor;
  const auto data = tensor.data;
  const auto dtype = tensor.dtype;
  const float of_tensor = functor.each(each);
  const bool splits = is_rest(dtype[kLower]);
  writes_lower = writes_lower && !splits;
  TileBuffer g_buffer, p_buffer, a_buffer, b_buffer, lower_buffer;
  for (int64_t start = 0; start < block.size; start += kTile) {
    const int64_t offset = block.offset + start;
    const int64_t n = block.size - start < kTile ? block.size - start : kTile;
    const Source from = source(data[0], dtype[0], offset, n, g_buffer);
    float* p = splits ? edit_split(data[1], data[kLower], dtype[1], offset, n, p_buffer)
                      : edit(data[1], dtype[1], offset, n, p_buffer);
    float* a = kStates > 0 ? edit(data[2], dtype[2], offset, n, a_buffer) : nullptr;
    float* b = kStates > 1 ? edit(data[3], dtype[3], offset, n, b_buffer) : nullptr;
    const Sink to = sink(data[kLower], dtype[kLower], offset, lower_buffer, streams);
    const bool fuses_lower = writes_lower && to.is_bfloat16;
    const float* g = static_cast<const float*>(from.data);
    const BFloat16* narrow_g = static_cast<const BFloat16*>(from.data);
    BFloat16* lower = static_cast<BFloat16*>(to.data);
    if (from.is_bfloat16)
      fuses_lower ? step_tile<true>(narrow_g, p, a, b, lower, n, functor, of_tensor)
                  : step_tile<false>(narrow_g, p, a, b, lower, n, functor, of_tensor);
    else
      fuses_lower ? step_tile<true>(g, p, a, b, lower, n, functor, of_tensor)
                  : step_tile<false>(g, p, a, b, lower, n, functor, of_tensor);
    if (splits)
      split_tile(p, data[1], data[kLower], dtype[1], offset, n);
    else
      store(p, data[1], dtype[1], offset, n);
    if (kStates > 0) store(a, data[2], dtype[2], offset, n);
    if (kStates > 1) store(b, data[3], dtype[3], offset, n);
    if (fuses_lower)
      finish(to, data[kLower], dtype[kLower], offset, n, streams);
    else if (writes_lower)
      store(p, data[kLower], dtype[kLower], offset, n, streams);
  }
  finish_streams(writes_lower && streams);
}

}  // namespace AMPKIT_CAPABILITY
}  // namespace ampkit
