// step_block: the kernel of every optimizer's step, over any functor of functors/multi_tensor_step.h. Included once per
// instruction set, by cpu/each_capability.h.
//
// Memory traffic: gradients read once, parameters and states read and written once, lower written once, or, where it
// holds rests (Note [weights and rests]), read and written once.
namespace ampkit {
namespace AMPKIT_CAPABILITY {

// Float32 parameters, with the interface of WeightsAndRests (cpu/tiles.h).
struct Floats {
  static constexpr int32_t kHighest = 0;
  float* values;

  AMPKIT_INLINE float get(int64_t i) const { return values[i]; }
  AMPKIT_INLINE int32_t set(int64_t i, float x) const {
    values[i] = x;
    return 0;
  }
  void settle(int64_t) const {}
  float* edit(int64_t, TileBuffer&) const { return values; }
  void store(const float*, int64_t) const {}
};

// The next tile of every list, asked for while a tile is updated. A processor prefetches within a page, which one tile of a float32
// list fills. Without this a step takes a sixth more time, with packed moments two fifths (AVX-512).
template <int kDepth>
struct NextTile {
  const char* lists[kDepth];
  int64_t sizes[kDepth];  // of an element
  int64_t left;           // elements of the tensor from the next tile on

  NextTile(const FlatTensor<kDepth>& tensor, int64_t offset) : left(tensor.numel - offset - kTile) {
    for (int k = 0; k < kDepth; ++k) {
      sizes[k] = tensor.dtype[k] == DType::kFloat ? 4 : tensor.dtype[k] == DType::kPacked ? 1 : 2;
      lists[k] = tensor.data[k] == nullptr ? nullptr : static_cast<const char*>(tensor.data[k]) + (offset + kTile) * sizes[k];
    }
  }

  // Asks for what follows elements [start, start + n) by a tile.
  AMPKIT_INLINE void prefetch(int64_t start, int64_t n) const {
    if (start >= left) return;
    for (int k = 0; k < kDepth; ++k)
      for (int64_t byte = start * sizes[k]; lists[k] != nullptr && byte < (start + n) * sizes[k]; byte += 64)
        __builtin_prefetch(lists[k] + byte);
  }
};

// Calls body(gradients, parameters) for elements [offset, offset + n): gradients as float or BFloat16, parameters as
// WeightsAndRests or Floats, which are in the buffer if they are in lower precision; store(values) writes Floats back.
template <class Functor, class Body, class Store>
static inline void visit_step(const FlatTensor<Functor::kStates + 3>& tensor, int64_t offset, int64_t n, TileBuffer& g_buffer,
                              TileBuffer& p_buffer, const Body& body, const Store& store) {
  constexpr int kLower = Functor::kStates + 2;
  visit_tile(tensor.data[0], tensor.dtype[0], offset, n, g_buffer, [&](const auto* g) {
    if constexpr (Functor::kTakesRests)
      if (is_rest(tensor.dtype[kLower]))
        return visit_rests(tensor.data[1], tensor.data[kLower], tensor.dtype[1], offset, [&](auto params) { body(g, params); });
    float* p = load(tensor.data[1], tensor.dtype[1], offset, n, p_buffer);
    body(g, Floats{p});
    store(p);
  });
}

template <class Grad, class Params, class Functor, class Next>
static void step_tile(const Grad* g, Params p, float* a, float* b, int64_t n, Functor functor, float of_tensor, const Next& next) {
  constexpr int64_t kStride = 128;
  int32_t highest = 0;
  for (int64_t start = 0; start < n; start += kStride) {
    const int64_t end = start + kStride < n ? start + kStride : n;
    next.prefetch(start, kStride);
#pragma GCC ivdep  // lists do not overlap, except element for element
    for (int64_t i = start; i < end; ++i) {
      float param = p.get(i), state = 0, second_state = 0;
      if (Functor::kStates > 0) state = a[i];
      if (Functor::kStates > 1) second_state = b[i];
      functor(widen(g[i]), param, state, second_state, of_tensor);
      const int32_t magnitude = p.set(i, param);
      highest = magnitude > highest ? magnitude : highest;
      if (Functor::kStates > 0 && !Functor::kKeepsStates) a[i] = state;
      if (Functor::kStates > 1 && !Functor::kKeepsStates) b[i] = second_state;
    }
  }
  if (highest > Params::kHighest) p.settle(n);
}

// Runs the functor over parameters that it does not change; adds their squares and those of its directions to sums.
template <class Grad, class Functor, class Next>
static void directions_tile(const Grad* g, const float* p, float* a, float* b, int64_t n, Functor functor, double* sums,
                            const Next& next) {
  TileBuffer directions;
  __builtin_memcpy(directions.values, p, static_cast<size_t>(n) * sizeof(float));
  step_tile(g, Floats{directions.values}, a, b, n, functor, 1.0f, next);
  sums[0] += sum_of_squares(p, n).sum;
  sums[1] += sum_of_squares(directions.values, n).sum;
}

// sums: the block's two, for rules with kSumsSquares.
template <class Functor>
static void step_block(const Block<Functor::kStates + 3>& block, Functor functor, float each, bool writes_lower, double* sums) {
  constexpr int kStates = Functor::kStates, kLower = kStates + 2;
  const FlatTensor<kStates + 3>& tensor = *block.tensor;
  const auto data = tensor.data;
  const auto dtype = tensor.dtype;
  const float of_tensor = functor.each(each);
  TileBuffer g_buffer, p_buffer, a_buffer, b_buffer;
  for (int64_t start = 0; start < block.size; start += kTile) {
    const int64_t offset = block.offset + start;
    const int64_t n = block.size - start < kTile ? block.size - start : kTile;
    const NextTile<kStates + 3> next(tensor, offset);
    float* a = kStates > 0 ? load(data[2], dtype[2], offset, n, a_buffer) : nullptr;
    float* b = kStates > 1 ? load(data[3], dtype[3], offset, n, b_buffer) : nullptr;
    visit_step<Functor>(
        tensor, offset, n, g_buffer, p_buffer,
        [&](const auto* g, auto params) {
          if constexpr (Functor::kSumsSquares)
            directions_tile(g, params.values, a, b, n, functor, sums, next);
          else
            step_tile(g, params, a, b, n, functor, of_tensor, next);
        },
        [&](const float* p) {
          if (Functor::kSumsSquares) return;
          store(p, data[1], dtype[1], offset, n);
          if (writes_lower) store(p, data[kLower], dtype[kLower], offset, n);
        });
    if (Functor::kKeepsStates) continue;
    if (kStates > 0) store(a, data[2], dtype[2], offset, n);
    if (kStates > 1) store(b, data[3], dtype[3], offset, n);
  }
}

}  // namespace AMPKIT_CAPABILITY
}  // namespace ampkit
