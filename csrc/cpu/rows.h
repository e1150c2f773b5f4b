// What is more exact beside a gradient (functors/multi_tensor_restore.h): rows of both at once. Included once per instruction
// set, by the kernels that restore.
//
// The dtypes that gradients have in training get loops of their own: a gradient in float16 or bfloat16, the exact value in the
// same dtype or float32, results in float32. Whatever else is asked for its dtype at every row (Any).
namespace ampkit {
namespace AMPKIT_CAPABILITY {

// One run, or as many as a vector holds. Blocks begin where runs do.
constexpr int kRow = kLanes < kRestoreRun ? kRestoreRun : kLanes, kVectors = kRow / kLanes;

struct Row {
  Vector of[kVectors];
};

struct Any {
  void* data;
  DType dtype;
};

// Beyond the end of a tensor all is zero, and nothing is written.
template <class T>
AMPKIT_VECTOR_INLINE Row load_row(const T* x, int64_t i, int64_t count) {
  Row row;
  T part[kRow] = {};
  const T* from = x + i;
  if (count < kRow) {
    __builtin_memcpy(part, from, static_cast<size_t>(count) * sizeof(T));
    from = part;
  }
  for (int v = 0; v < kVectors; ++v) row.of[v] = load_vector(from + v * kLanes);
  return row;
}
AMPKIT_VECTOR_INLINE Row load_row(Any x, int64_t i, int64_t count) {
  return visit(x.data, x.dtype, 0, [&](const auto* typed) { return load_row(typed, i, count); });
}

template <bool kStreams, class T>
AMPKIT_VECTOR_INLINE void put_row(T* to, int64_t i, const Row& row, int64_t count) {
  if (count == kRow) {
    for (int v = 0; v < kVectors; ++v) put<kStreams>(to + i + v * kLanes, row.of[v], kLanes);
    return;
  }
  T part[kRow];
  for (int v = 0; v < kVectors; ++v) store_vector(part + v * kLanes, row.of[v]);
  __builtin_memcpy(to + i, part, static_cast<size_t>(count) * sizeof(T));
}
template <bool kStreams>
AMPKIT_VECTOR_INLINE void put_row(Any to, int64_t i, const Row& row, int64_t count) {
  visit(to.data, to.dtype, 0, [&](auto* typed) { put_row<kStreams>(typed, i, row, count); });
}

// As a tensor like this one would hold it.
template <class T>
AMPKIT_VECTOR_INLINE Vector held_by(const T*, Vector x) {
  T held[kLanes];
  store_vector(held, x);
  return load_vector(held);
}
AMPKIT_VECTOR_INLINE Vector held_by(const BFloat16*, Vector x) { return vector_of(bfloat16_bits(x) << 16); }
AMPKIT_VECTOR_INLINE Vector held_by(const float*, Vector x) { return x; }
AMPKIT_VECTOR_INLINE Vector held_by(Any like, Vector x) {
  return visit(like.data, like.dtype, 0, [&](const auto* typed) { return held_by(typed, x); });
}

template <class Grad, class Exact>
AMPKIT_VECTOR_INLINE Row restored(const RestoreFunctor& functor, Grad grads, Exact exacts, int64_t i, int64_t count) {
  const Row grad = load_row(grads, i, count), exact = load_row(exacts, i, count);
  Row out;
  uint32_t changed = 0;
  for (int v = 0; v < kVectors; ++v) {
    const Vector unscaled = functor.unscaled(exact.of[v]);
    changed |= differing(grad.of[v], held_by(grads, unscaled)) << (v * kLanes);
    out.of[v] = functor.zeros_count ? if_equal(grad.of[v], Vector{}, grad.of[v], unscaled) : unscaled;
  }
  if (changed != 0) {
    uint32_t written = 0;
    for (int bit = 0; bit < kRow; bit += kRestoreRun)
      written |= functor.written(changed >> bit & ((1u << kRestoreRun) - 1)) << bit;
    for (int v = 0; v < kVectors; ++v) out.of[v] = select(written >> (v * kLanes), grad.of[v], out.of[v]);
  }
  for (int v = 0; v < kVectors; ++v) out.of[v] = out.of[v] * functor.factor;
  return out;
}

// Calls body(i, count) for each row of elements [offset, offset + n).
template <class Body>
AMPKIT_VECTOR_INLINE void for_each_row(int64_t offset, int64_t n, const Body& body) {
  const int64_t end = offset + n;
  int64_t i = offset;
  for (; i + kRow <= end; i += kRow) body(i, kRow);
  if (i < end) body(i, end - i);
}

// Calls body(grad, exact), with pointers to the types that they have where is_usual says that the other lists are usual too.
template <class Body>
AMPKIT_VECTOR_INLINE auto visit_pair(Any grad, Any exact, bool is_usual, const Body& body) {
  if (is_usual && grad.dtype == DType::kHalf && exact.dtype != DType::kBFloat16) {
    if (exact.dtype == DType::kHalf) return body(static_cast<Half*>(grad.data), static_cast<Half*>(exact.data));
    return body(static_cast<Half*>(grad.data), static_cast<float*>(exact.data));
  }
  if (is_usual && grad.dtype == DType::kBFloat16 && exact.dtype != DType::kHalf) {
    if (exact.dtype == DType::kFloat) return body(static_cast<BFloat16*>(grad.data), static_cast<float*>(exact.data));
    return body(static_cast<BFloat16*>(grad.data), static_cast<BFloat16*>(exact.data));
  }
  return body(grad, exact);
}

// The memory of another list: of the dtype of a gradient, or float32, where that has a type of its own.
template <class T>
AMPKIT_VECTOR_INLINE T* like(T*, Any other) {
  return static_cast<T*>(other.data);
}
AMPKIT_VECTOR_INLINE Any like(Any, Any other) { return other; }

template <class T>
AMPKIT_VECTOR_INLINE float* floats_beside(T*, Any other) {
  return static_cast<float*>(other.data);
}
AMPKIT_VECTOR_INLINE Any floats_beside(Any, Any other) { return other; }

}  // namespace AMPKIT_CAPABILITY
}  // namespace ampkit
