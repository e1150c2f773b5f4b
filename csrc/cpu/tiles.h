// How CPU kernels read and write any dtype with float32 arithmetic. Included once per instruction set, by
// cpu/each_capability.h.
//
// Vectors: visit() gives a kernel its memory as float, Half or BFloat16; load_vector() and store_vector() convert
// in registers. Kernels with little arithmetic are loops over vectors, for one input and one output list.
//
// Tiles: an operator over k lists would need 3^k such loops. Instead it processes its block in tiles that fit into the
// first-level cache. load() returns a tile as float32: the memory itself if it is float32 already, a converted copy
// otherwise. The arithmetic is a plain loop over float32. target() and store() do the same for outputs, load() and store() for
// tiles that are updated in place. visit_tile() does not convert bfloat16, which is a shift, for loops that are templates over it.
namespace ampkit {
namespace AMPKIT_CAPABILITY {

constexpr int64_t kTile = 1024;
constexpr int64_t kSquares = 4096;  // at most, for is_safe()

struct alignas(64) TileBuffer {
  float values[kTile];
};

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

static inline float widen(float x) { return x; }
static inline float widen(BFloat16 x) { return float_of_bits(static_cast<uint32_t>(x.bits) << 16); }

// Vector: as many floats as a register holds, or one. Words are its bits; a comparison gives all ones if it holds.
#define AMPKIT_VECTOR_INLINE static inline __attribute__((always_inline))
constexpr int kLanes = AMPKIT_LANES;
typedef float Vector __attribute__((vector_size(4 * AMPKIT_LANES), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * AMPKIT_LANES), aligned(4), may_alias));

AMPKIT_VECTOR_INLINE Words words_of(Vector x) { return reinterpret_cast<const Words&>(x); }
AMPKIT_VECTOR_INLINE Vector vector_of(Words x) { return reinterpret_cast<const Vector&>(x); }
// Signed, which is faster: neither has its highest bit set.
AMPKIT_VECTOR_INLINE Words is_above(Words x, int32_t limit) {
  typedef int32_t Integers __attribute__((vector_size(4 * AMPKIT_LANES), may_alias));
  return reinterpret_cast<const Words&>(static_cast<const Integers&>(reinterpret_cast<const Integers&>(x) > limit));
}
// One instruction each; the compiler makes five of __builtin_convertvector.
#if AMPKIT_LANES == 16
AMPKIT_VECTOR_INLINE Words load_words(const uint16_t* x) {
  return reinterpret_cast<Words>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))));
}
AMPKIT_VECTOR_INLINE void store_words(uint16_t* to, Words x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(x)));
}
#elif AMPKIT_LANES == 8
AMPKIT_VECTOR_INLINE Words load_words(const uint16_t* x) {
  return reinterpret_cast<Words>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
}
AMPKIT_VECTOR_INLINE void store_words(uint16_t* to, Words x) {
  const __m256i words = reinterpret_cast<__m256i>(x);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
}
#else
typedef uint16_t HalfWords __attribute__((vector_size(2 * AMPKIT_LANES), aligned(2), may_alias));

AMPKIT_VECTOR_INLINE Words load_words(const uint16_t* x) {
  return __builtin_convertvector(*reinterpret_cast<const HalfWords*>(x), Words);
}
AMPKIT_VECTOR_INLINE void store_words(uint16_t* to, Words x) {
  *reinterpret_cast<HalfWords*>(to) = __builtin_convertvector(x, HalfWords);
}
#endif

AMPKIT_VECTOR_INLINE Words either(Words condition, Words yes, Words no) { return (condition & yes) | (~condition & no); }

#if AMPKIT_LANES == 16
AMPKIT_VECTOR_INLINE Vector vector_from_halves(const uint16_t* x) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}
AMPKIT_VECTOR_INLINE void store_halves(uint16_t* to, Vector x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
#elif AMPKIT_LANES == 8
AMPKIT_VECTOR_INLINE Vector vector_from_halves(const uint16_t* x) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}
AMPKIT_VECTOR_INLINE void store_halves(uint16_t* to, Vector x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
#else
// A subnormal counts in units of 2^-24, the last place of 0.5. No product moves exponents: under
// torch.set_flush_denormal(True) the processor would read a subnormal as 0, unlike torch and the other instruction sets. Infinity
// and NaN get their exponent back.
AMPKIT_VECTOR_INLINE Vector vector_from_halves(const uint16_t* x) {
  const Words half = load_words(x), magnitude = half & 0x7fff;
  const Words subnormal = words_of(vector_of(magnitude + 0x3f000000) - 0.5f);
  const Words normal = ((magnitude << 13) + 0x38000000) | (is_above(magnitude, 0x7bff) & 0x7f800000);
  return vector_of(either(is_above(magnitude, 0x3ff), normal, subnormal) | (half & 0x8000) << 16);
}

// Subnormals are rounded by adding 0.5, whose last place is theirs; normal numbers by adding half of their last place.
AMPKIT_VECTOR_INLINE void store_halves(uint16_t* to, Vector x) {
  const Words bits = words_of(x), magnitude = bits & 0x7fffffff;
  const Words subnormal = words_of(vector_of(magnitude) + 0.5f) - 0x3f000000;
  const Words normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const Words special = (is_above(magnitude, 0x7f800000) & 0x200) | 0x7c00;
  const Words finite = either(is_above(magnitude, 0x387fffff), normal, subnormal);
  store_words(to, either(is_above(magnitude, 0x477fffff), special, finite) | ((bits >> 16) & 0x8000));
}
#endif

AMPKIT_VECTOR_INLINE Vector load_vector(const float* x) { return *reinterpret_cast<const Vector*>(x); }
AMPKIT_VECTOR_INLINE Vector load_vector(const Half* x) { return vector_from_halves(&x->bits); }
AMPKIT_VECTOR_INLINE Vector load_vector(const BFloat16* x) { return vector_of(load_words(&x->bits) << 16); }

AMPKIT_VECTOR_INLINE void store_vector(float* to, Vector x) { *reinterpret_cast<Vector*>(to) = x; }
AMPKIT_VECTOR_INLINE void store_vector(Half* to, Vector x) { store_halves(&to->bits, x); }
// Round to nearest, ties to even; a NaN stays one.
AMPKIT_VECTOR_INLINE Words bfloat16_bits(Vector x) {
  const Words bits = words_of(x);
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return x == x ? rounded : Words{} + 0x7fc0;
}
AMPKIT_VECTOR_INLINE void store_vector(BFloat16* to, Vector x) { store_words(&to->bits, bfloat16_bits(x)); }

// The first n elements of a vector; the others are 0, and not written.
template <class T>
AMPKIT_VECTOR_INLINE Vector load_part(const T* x, int64_t n) {
  T part[kLanes] = {};
  __builtin_memcpy(part, x, static_cast<size_t>(n) * sizeof(T));
  return load_vector(part);
}

template <class T>
AMPKIT_VECTOR_INLINE void store_part(T* to, Vector x, int64_t n) {
  T part[kLanes];
  store_vector(part, x);
  __builtin_memcpy(to, part, static_cast<size_t>(n) * sizeof(T));
}

// The finite check: v - v is 0, or NaN where v is not finite. Collected by |=.
AMPKIT_VECTOR_INLINE Words distance_to_itself(Vector v) { return words_of(v - v); }

static inline bool are_zero(const Words& words) {
  uint32_t lanes[kLanes];
  __builtin_memcpy(lanes, &words, sizeof(lanes));
  uint32_t any = 0;
  for (int k = 0; k < kLanes; ++k) any |= lanes[k];
  return any == 0;
}

// Calls body with the memory of elements [offset, ...), as a pointer to their type.
template <class Body>
AMPKIT_VECTOR_INLINE auto visit(void* data, DType dtype, int64_t offset, const Body& body) {
  if (dtype == DType::kFloat) return body(static_cast<float*>(data) + offset);
  if (dtype == DType::kHalf) return body(static_cast<Half*>(data) + offset);
  return body(static_cast<BFloat16*>(data) + offset);
}

// Calls body(i, v, count) for the vectors v of elements [i, i + count) of x; count is kLanes for all but the last.
template <class T, class Body>
AMPKIT_VECTOR_INLINE void for_each_vector(const T* x, int64_t n, const Body& body) {
  int64_t i = 0;
#pragma GCC unroll 4
  for (; i + kLanes <= n; i += kLanes) body(i, load_vector(x + i), kLanes);
  if (i < n) body(i, load_part(x + i, n - i), n - i);
}

template <class T>
AMPKIT_VECTOR_INLINE void put(T* to, Vector x, int64_t count) {
  count < kLanes ? store_part(to, x, count) : store_vector(to, x);
}

template <class In, class Out>
static inline void convert(const In* from, Out* to, int64_t n) {
  for_each_vector(from, n, [&](int64_t i, Vector v, int64_t count) { put(to + i, v, count); });
}

// Elements [offset, offset + n) as float32. They may be updated in place: store() writes them back.
static inline float* load(void* data, DType dtype, int64_t offset, int64_t n, TileBuffer& buffer) {
  if (dtype == DType::kFloat) return static_cast<float*>(data) + offset;
  visit(data, dtype, offset, [&](const auto* from) { convert(from, buffer.values, n); });
  return buffer.values;
}

// The place for float32 results, which store() then writes to the tensor.
static inline float* target(void* data, DType dtype, int64_t offset, TileBuffer& buffer) {
  return dtype == DType::kFloat ? static_cast<float*>(data) + offset : buffer.values;
}

static inline void store(const float* values, void* data, DType dtype, int64_t offset, int64_t n) {
  visit(data, dtype, offset, [&](auto* to) {
    if (static_cast<void*>(to) != values) convert(values, to, n);
  });
}

// Calls body with elements [offset, offset + n) as a loop reads them: float, or BFloat16.
template <class Body>
static inline auto visit_tile(void* data, DType dtype, int64_t offset, int64_t n, TileBuffer& buffer, const Body& body) {
  if (dtype == DType::kBFloat16) return body(static_cast<const BFloat16*>(data) + offset);
  return body(load(data, dtype, offset, n, buffer));
}

// Weights and rests as a loop reads and writes them, joined and split in registers: Note [weights and rests]. A loop writes by
// bits alone, which takes a third of the time; if the highest result of set() exceeds kHighest, it calls settle() afterwards.
template <bool kHalf>
struct WeightsAndRests {
  static constexpr int32_t kHighest = SplitFormat<false>::kLargest;
  uint16_t* weights;
  int16_t* rests;

  AMPKIT_INLINE float get(int64_t i) const { return join<kHalf>(weights[i], rests[i]); }
  AMPKIT_INLINE int32_t set(int64_t i, float x) const {
    kHalf ? split<true>(x, weights[i], rests[i]) : split_bits(x, weights[i], rests[i]);
    return kHalf ? 0 : float_bits(x) & 0x7fffffff;
  }
  void settle(int64_t n) const {
    for (int64_t i = 0; i < n; ++i) split<false>(join_bits(weights[i], rests[i]), weights[i], rests[i]);
  }

  // A tile of them as float32, and back.
  float* edit(int64_t n, TileBuffer& buffer) const {
    copy_to(buffer.values, n);
    return buffer.values;
  }
  void copy_to(float* to, int64_t n) const {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) to[i] = get(i);
  }
  void store(const float* from, int64_t n) const {
    int32_t highest = 0;
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      const int32_t magnitude = set(i, from[i]);
      highest = magnitude > highest ? magnitude : highest;
    }
    if (highest > kHighest) settle(n);
  }
};

// Calls body with the WeightsAndRests that begin at element `offset` of weights in this dtype and of their rests.
template <class Body>
static inline void visit_rests(void* weights, void* rests, DType dtype, int64_t offset, const Body& body) {
  uint16_t* upper = static_cast<uint16_t*>(weights) + offset;
  int16_t* lower = static_cast<int16_t*>(rests) + offset;
  dtype == DType::kHalf ? body(WeightsAndRests<true>{upper, lower}) : body(WeightsAndRests<false>{upper, lower});
}

template <class T>
static bool all_zero(const T* x, int64_t n) {
  Words any = {};
  for_each_vector(x, n, [&](int64_t, Vector v, int64_t) { any |= words_of(v); });
  return are_zero(any << 1);  // without the signs
}

template <class T>
static SumOfSquares wide_sum_of_squares(const T* x, int64_t n) {
  if (all_zero(x, n)) return {0, true};  // such as gradients of unused parameters
  constexpr int kSums = 16;
  const SquareFunctor square;
  double sums[kSums] = {};
  Words distances = {};
  for (int64_t i = 0; i < n; i += kSums) {
    float values[kSums] = {};
    convert(x + i, values, n - i < kSums ? n - i : kSums);
    for (int k = 0; k < kSums; ++k) sums[k] += square(values[k]);
    for (int k = 0; k < kSums; k += kLanes) {
      const Vector v = load_vector(values + k);
      distances |= distance_to_itself(v);
    }
  }
  for (int width = kSums / 2; width > 0; width /= 2)
    for (int k = 0; k < width; ++k) sums[k] += sums[k + width];
  return {sums[0], are_zero(distances)};
}

// The squares of at most kSquares elements, as a float32 sum over sixty-four lanes on every instruction set, so that the
// bits are the same. also(i, v, count) gets every vector, as in for_each_vector, to write it somewhere else. If the sum is safe,
// all values are finite; only otherwise they are checked again (functors/multi_tensor_l2norm.h).
template <class T, class Also>
static inline SumOfSquares sum_of_squares(const T* x, int64_t n, const Also& also) {
  constexpr int kSums = 64, kVectors = kSums / kLanes;
  Vector sums[kVectors] = {};
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums) {
    // Processors prefetch too little by themselves for elements that take so little time.
    if (sizeof(T) == 2)
      for (int k = 0; k < kSums; k += 32) __builtin_prefetch(x + i + 512 + k);
#pragma GCC unroll 16
    for (int k = 0; k < kVectors; ++k) {
      const Vector v = load_vector(x + i + k * kLanes);
      sums[k] += v * v;
      also(i + k * kLanes, v, kLanes);
    }
  }
  for_each_vector(x + i, n - i, [&](int64_t k, Vector v, int64_t count) {
    sums[k / kLanes] += v * v;
    also(i + k, v, count);
  });
  float lanes[kSums];
  __builtin_memcpy(lanes, sums, sizeof(lanes));
  for (int width = kSums / 2; width > 0; width /= 2)
    for (int k = 0; k < width; ++k) lanes[k] += lanes[k + width];
  return is_safe(lanes[0]) ? SumOfSquares{lanes[0], true} : wide_sum_of_squares(x, n);
}

template <class T>
static inline SumOfSquares sum_of_squares(const T* x, int64_t n) {
  return sum_of_squares(x, n, [](int64_t, Vector, int64_t) {});
}

}  // namespace AMPKIT_CAPABILITY
}  // namespace ampkit
