// Tiles: how CPU kernels read and write any dtype with float32 arithmetic. Included once per instruction set, by
// cpu/each_capability.h.
//
// A kernel walks its block in tiles small enough to stay in the first-level cache. load() gives a tile as float32: the
// memory itself where it is float32 already, a converted copy otherwise. The arithmetic is a plain loop over float32.
// target() and store() do the same on the way out, edit() and store() where a tile is updated in place. So an operator
// over k lists needs one loop, not 3^k.
//
// The busiest kernels convert bfloat16 within their loop instead, which is a shift: source() and sink() leave it alone, and
// the loop is a template over float and BFloat16.
//
// Outputs that nobody reads soon may be streamed: written past the caches, which saves reading their lines first.
namespace ampkit {
namespace AMPKIT_CAPABILITY {

constexpr int64_t kTile = 1024;

struct alignas(64) TileBuffer {
  float values[kTile];
};

static inline float float_from_bits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

static inline uint32_t bits_from_float(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}

static inline float float_from_bfloat16(uint16_t x) { return float_from_bits(static_cast<uint32_t>(x) << 16); }

// Round to nearest, ties to even; a NaN stays one.
static inline uint16_t bfloat16_from_float(float x) {
  const uint32_t bits = bits_from_float(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : static_cast<uint16_t>(rounded);
}

// Without branches, so that the loops around these two vectorise. The exponent is moved by multiplying with 2^112,
// which also normalises subnormals; infinity and NaN come out at 2^16 and above, and get their exponent back.
static inline float float_from_half(uint16_t x) {
  const uint32_t magnitude = static_cast<uint32_t>(x & 0x7fff) << 13;
  const float moved = float_from_bits(magnitude) * 0x1p112f;
  const uint32_t special = (x & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;
  return float_from_bits(bits_from_float(moved) | special | static_cast<uint32_t>(x & 0x8000) << 16);
}

// Subnormals are rounded by adding 0.5, whose last place is theirs; normal numbers by adding half of theirs.
static inline uint16_t half_from_float(float x) {
  const uint32_t bits = bits_from_float(x);
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t subnormal = bits_from_float(float_from_bits(magnitude) + 0.5f) - 0x3f000000;
  const uint32_t normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
  const uint32_t finite = magnitude < 0x38800000 ? subnormal : normal;
  return static_cast<uint16_t>((magnitude >= 0x47800000 ? special : finite) | (bits >> 16 & 0x8000));
}

static inline void widen_half(const uint16_t* from, float* to, int64_t n) {
  int64_t i = 0;
#if AMPKIT_LANES == 16
  for (; i + 16 <= n; i += 16)
    _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i))));
#elif AMPKIT_LANES == 8
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
  for (; i < n; ++i) to[i] = float_from_half(from[i]);
}

static inline void narrow_half(const float* from, uint16_t* to, int64_t n) {
  int64_t i = 0;
#if AMPKIT_LANES == 16
  for (; i + 16 <= n; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm512_cvtps_ph(_mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#elif AMPKIT_LANES == 8
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < n; ++i) to[i] = half_from_float(from[i]);
}

static inline void widen_bfloat16(const uint16_t* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = float_from_bfloat16(from[i]);
}

static inline void narrow_bfloat16(const float* from, uint16_t* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = bfloat16_from_float(from[i]);
}

// Elements [offset, offset + n) as float32.
static inline const float* load(const void* data, DType dtype, int64_t offset, int64_t n, TileBuffer& buffer) {
  if (dtype == DType::kFloat) return static_cast<const float*>(data) + offset;
  const uint16_t* from = static_cast<const uint16_t*>(data) + offset;
  if (dtype == DType::kHalf)
    widen_half(from, buffer.values, n);
  else
    widen_bfloat16(from, buffer.values, n);
  return buffer.values;
}

// The same, to be updated where it lies; store() brings it home.
static inline float* edit(void* data, DType dtype, int64_t offset, int64_t n, TileBuffer& buffer) {
  return const_cast<float*>(load(data, dtype, offset, n, buffer));
}

// Where to put float32 results that store() will bring to their place.
static inline float* target(void* data, DType dtype, int64_t offset, TileBuffer& buffer, bool streams = false) {
  return dtype == DType::kFloat && !streams ? static_cast<float*>(data) + offset : buffer.values;
}

// Copies past the caches. Lines that are not written whole are written the ordinary way.
static inline void stream(void* to, const void* from, int64_t bytes) {
  int64_t i = 0;
#if AMPKIT_X86_VARIANTS
  char* target = static_cast<char*>(to);
  const char* source = static_cast<const char*>(from);
  if (reinterpret_cast<uintptr_t>(target) % 64 == 0)
    for (; i + 64 <= bytes; i += 64) {
#if AMPKIT_LANES == 16
      _mm512_stream_si512(reinterpret_cast<__m512i*>(target + i), _mm512_loadu_si512(source + i));
#elif AMPKIT_LANES == 8
      for (int64_t k = i; k < i + 64; k += 32)
        _mm256_stream_si256(reinterpret_cast<__m256i*>(target + k), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + k)));
#else
      for (int64_t k = i; k < i + 64; k += 16)
        _mm_stream_si128(reinterpret_cast<__m128i*>(target + k), _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + k)));
#endif
    }
#endif
  if (i < bytes) __builtin_memcpy(static_cast<char*>(to) + i, static_cast<const char*>(from) + i, static_cast<size_t>(bytes - i));
}

// Streamed writes become visible to other threads after this.
static inline void finish_streams(bool streams) {
#if AMPKIT_X86_VARIANTS
  if (streams) _mm_sfence();
#else
  (void)streams;
#endif
}

static inline void store(const float* values, void* data, DType dtype, int64_t offset, int64_t n, bool streams = false) {
  if (dtype == DType::kFloat) {
    float* to = static_cast<float*>(data) + offset;
    if (to != values) streams ? stream(to, values, n * 4) : static_cast<void>(__builtin_memcpy(to, values, static_cast<size_t>(n) * 4));
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(data) + offset;
  alignas(64) uint16_t narrow[kTile];
  uint16_t* narrowed = streams ? narrow : to;
  if (dtype == DType::kHalf)
    narrow_half(values, narrowed, n);
  else
    narrow_bfloat16(values, narrowed, n);
  if (streams) stream(to, narrowed, n * 2);
}

struct BFloat16 {
  uint16_t bits;
};

static inline float widen(float x) { return x; }
static inline float widen(BFloat16 x) { return float_from_bfloat16(x.bits); }
static inline void narrow(float x, float& to) { to = x; }
static inline void narrow(float x, BFloat16& to) { to.bits = bfloat16_from_float(x); }

// Elements [offset, offset + n) as a loop reads them: float, or BFloat16 if this says so.
struct Source {
  const void* data;
  bool is_bfloat16;
};

static inline Source source(const void* data, DType dtype, int64_t offset, int64_t n, TileBuffer& buffer) {
  if (dtype == DType::kBFloat16) return {static_cast<const uint16_t*>(data) + offset, true};
  return {load(data, dtype, offset, n, buffer), false};
}

// Where a loop puts its results, as float or BFloat16; finish() brings them to their place.
struct Sink {
  void* data;
  bool is_bfloat16;
};

static inline Sink sink(void* data, DType dtype, int64_t offset, TileBuffer& buffer, bool streams) {
  if (dtype == DType::kBFloat16) return {streams ? static_cast<void*>(buffer.values) : static_cast<uint16_t*>(data) + offset, true};
  return {target(data, dtype, offset, buffer, streams), false};
}

static inline void finish(const Sink& sink, void* data, DType dtype, int64_t offset, int64_t n, bool streams) {
  if (!sink.is_bfloat16)
    store(static_cast<const float*>(sink.data), data, dtype, offset, n, streams);
  else if (streams)
    stream(static_cast<uint16_t*>(data) + offset, sink.data, n * 2);
}

template <class T>
static inline int32_t highest_magnitude(const T* values, int64_t n) {
  int32_t highest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t bits = magnitude_bits(widen(values[i]));
    highest = bits > highest ? bits : highest;
  }
  return highest;
}

#if defined(__GNUC__)
typedef float Vector __attribute__((vector_size(4 * AMPKIT_LANES), aligned(4), may_alias));
typedef uint32_t WordVector __attribute__((vector_size(4 * AMPKIT_LANES), aligned(4), may_alias));
typedef uint16_t HalfVector __attribute__((vector_size(2 * AMPKIT_LANES), aligned(2), may_alias));

static inline __attribute__((always_inline)) Vector load_vector(const float* x) { return *reinterpret_cast<const Vector*>(x); }

static inline __attribute__((always_inline)) Vector load_vector(const BFloat16* x) {
  const WordVector bits = __builtin_convertvector(*reinterpret_cast<const HalfVector*>(x), WordVector) << 16;
  return reinterpret_cast<const Vector&>(bits);
}
#else
typedef float Vector;
template <class T>
static inline Vector load_vector(const T* x) {
  return widen(*x);
}
#endif

// The squares of a tile, float32 over sixty-four lanes whatever the instruction set, so that the bits are the same. All
// values are finite where the sum is safe; only otherwise they are looked at again (functors/multi_tensor_l2norm.h).
template <class T>
static inline SumOfSquares sum_of_squares(const T* x, int64_t n) {
  constexpr int kSums = 64, kWidth = sizeof(Vector) / 4, kVectors = kSums / kWidth;
  Vector sums[kVectors] = {};
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums)
    for (int k = 0; k < kVectors; ++k) {
      const Vector v = load_vector(x + i + k * kWidth);
      sums[k] += v * v;
    }
  float lanes[kSums];
  __builtin_memcpy(lanes, sums, sizeof(lanes));
  for (int k = 0; i + k < n; ++k) lanes[k] += widen(x[i + k]) * widen(x[i + k]);
  for (int width = kSums / 2; width > 0; width /= 2)
    for (int k = 0; k < width; ++k) lanes[k] += lanes[k + width];
  if (is_safe(lanes[0])) return {lanes[0], true};

  const bool finite = highest_magnitude(x, n) < kInfinityBits;
  const SquareFunctor square;
  double wide[16] = {};
  for (i = 0; i + 16 <= n; i += 16)
    for (int k = 0; k < 16; ++k) wide[k] += square(widen(x[i + k]));
  for (int k = 0; i + k < n; ++k) wide[k] += square(widen(x[i + k]));
  for (int width = 8; width > 0; width /= 2)
    for (int k = 0; k < width; ++k) wide[k] += wide[k + width];
  return {wide[0], finite};
}

static inline SumOfSquares sum_of_squares(const Source& from, int64_t n) {
  return from.is_bfloat16 ? sum_of_squares(static_cast<const BFloat16*>(from.data), n)
                          : sum_of_squares(static_cast<const float*>(from.data), n);
}

}  // namespace AMPKIT_CAPABILITY
}  // namespace ampkit
