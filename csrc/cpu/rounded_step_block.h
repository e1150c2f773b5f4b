// rounded_step_block: step_block where moments are packed (functors/moments.h), or results are rounded by numbers drawn
// (functors/rounding.h). Included once per instruction set, by cpu/each_capability.h.
//
// Tiles are float32 as everywhere: moments are unpacked into them and packed again. A tile is a whole number of their blocks.
#include "cpu/step_block.h"

namespace ampkit {
namespace AMPKIT_CAPABILITY {

static_assert(kTile % kMomentBlock == 0 && kMomentBlock % kDraws == 0, "tiles hold whole blocks of moments");

// Calls of Philox at once, each in the lower half of a lane of 64 bits: what is in the upper halves does not count.
#if AMPKIT_X86_VARIANTS && AMPKIT_LANES == 16
typedef __m512i Calls;
AMPKIT_VECTOR_INLINE Calls product_of_calls(Calls x, Calls y) { return _mm512_mul_epu32(x, y); }
AMPKIT_VECTOR_INLINE Calls upper_half(Calls x) { return _mm512_srli_epi64(x, 32); }
AMPKIT_VECTOR_INLINE Calls to_upper_half(Calls x) { return _mm512_slli_epi64(x, 32); }
AMPKIT_VECTOR_INLINE Calls all_calls(uint64_t x) { return _mm512_set1_epi64(static_cast<long long>(x)); }
#elif AMPKIT_X86_VARIANTS && AMPKIT_LANES == 8
typedef __m256i Calls;
AMPKIT_VECTOR_INLINE Calls product_of_calls(Calls x, Calls y) { return _mm256_mul_epu32(x, y); }
AMPKIT_VECTOR_INLINE Calls upper_half(Calls x) { return _mm256_srli_epi64(x, 32); }
AMPKIT_VECTOR_INLINE Calls to_upper_half(Calls x) { return _mm256_slli_epi64(x, 32); }
AMPKIT_VECTOR_INLINE Calls all_calls(uint64_t x) { return _mm256_set1_epi64x(static_cast<long long>(x)); }
#elif AMPKIT_X86_VARIANTS
typedef __m128i Calls;
AMPKIT_VECTOR_INLINE Calls product_of_calls(Calls x, Calls y) { return _mm_mul_epu32(x, y); }
AMPKIT_VECTOR_INLINE Calls upper_half(Calls x) { return _mm_srli_epi64(x, 32); }
AMPKIT_VECTOR_INLINE Calls to_upper_half(Calls x) { return _mm_slli_epi64(x, 32); }
AMPKIT_VECTOR_INLINE Calls all_calls(uint64_t x) { return _mm_set1_epi64x(static_cast<long long>(x)); }
#else
typedef uint64_t Calls;
static inline Calls product_of_calls(Calls x, Calls y) { return (x & 0xffffffffu) * (y & 0xffffffffu); }
static inline Calls upper_half(Calls x) { return x >> 32; }
static inline Calls to_upper_half(Calls x) { return x << 32; }
static inline Calls all_calls(uint64_t x) { return x; }
#endif
constexpr int64_t kCallsAtOnce = sizeof(Calls) / 8, kCalls = kTile / kDraws;

struct Drawn {
  alignas(64) uint16_t numbers[kTile];
};

// As Philox::operator(), for the elements [offset, offset + n).
static void draw(const Philox philox, uint32_t stream, int64_t offset, int64_t n, Drawn& drawn) {
  alignas(64) uint64_t front[kCalls], back[kCalls], indices[kCallsAtOnce];
  const int64_t calls = (n + kDraws - 1) / kDraws;
  for (int64_t i = 0; i < kCallsAtOnce; ++i) indices[i] = static_cast<uint64_t>(offset / kDraws + i);
  Calls index;
  __builtin_memcpy(&index, indices, sizeof(index));
  const Calls lower_half = all_calls(0xffffffffu);
  for (int64_t call = 0; call < calls; call += kCallsAtOnce) {
    Calls x0 = index, x1 = upper_half(index) | all_calls(stream << 24);
    Calls x2 = all_calls(philox.position), x3 = all_calls(philox.step);
    uint32_t key_low = philox.seed_low, key_high = philox.seed_high;
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      const Calls even = product_of_calls(x0, all_calls(0xD2511F53u)), odd = product_of_calls(x2, all_calls(0xCD9E8D57u));
      x0 = upper_half(odd) ^ x1 ^ all_calls(key_low);
      x2 = upper_half(even) ^ x3 ^ all_calls(key_high);
      x1 = odd;
      x3 = even;
      key_low += 0x9E3779B9u;
      key_high += 0xBB67AE85u;
    }
    const Calls first = (x0 & lower_half) | to_upper_half(x1), second = (x2 & lower_half) | to_upper_half(x3);
    __builtin_memcpy(front + call, &first, sizeof(first));
    __builtin_memcpy(back + call, &second, sizeof(second));
    index = index + all_calls(kCallsAtOnce);
  }
  alignas(64) uint64_t numbers[2 * kCalls];
  for (int64_t call = 0; call < calls; ++call) {
    numbers[2 * call] = front[call];
    numbers[2 * call + 1] = back[call];
  }
  __builtin_memcpy(drawn.numbers, numbers, static_cast<size_t>(calls) * 16);
}

template <class Code>
static void unpack(const uint8_t* codes, const uint32_t* highest, float* to, int64_t n) {
  for (int64_t start = 0; start < n; start += kMomentBlock) {
    const int64_t count = n - start < kMomentBlock ? n - start : kMomentBlock;
    const uint32_t base = base_of<Code>(*highest++ >> kDropped);
#pragma GCC ivdep
    for (int64_t i = start; i < start + count; ++i) to[i] = float_from_bits(Code::decode(codes[i], base));
  }
}

template <class Code>
static void pack(const float* x, uint8_t* codes, uint32_t* highest, int64_t n, const Drawn* drawn) {
  for (int64_t start = 0; start < n; start += kMomentBlock) {
    const int64_t count = n - start < kMomentBlock ? n - start : kMomentBlock;
    alignas(64) uint32_t dithers[kMomentBlock], places[kMomentBlock];
    if (drawn != nullptr)
      for (int64_t i = 0; i < count; ++i) dithers[i] = place_dither(drawn->numbers[start + i]);
    else
      for (int64_t i = 0; i < count; ++i) dithers[i] = kHalfPlace;
    uint32_t found = 0;
    for (int64_t i = 0; i < count; ++i) {
      places[i] = ((bits_from_float(x[start + i]) & 0x7fffffffu) + dithers[i]) >> kDropped;
      found = places[i] > found ? places[i] : found;
    }
    // That was Code::place, but for what is not finite, or next to nothing.
    if (found == 0 || found >= kInfinitePlace - 1) {
      found = 0;
      for (int64_t i = 0; i < count; ++i) {
        places[i] = Code::place(bits_from_float(x[start + i]), dithers[i]);
        found = places[i] > found ? places[i] : found;
      }
    }
    const uint32_t base = base_of<Code>(found);
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i)
      codes[start + i] = static_cast<uint8_t>(Code::encode(bits_from_float(x[start + i]), places[i], base));
    *highest++ = found << kDropped;
  }
}

// The blocks' places beside codes that begin at element `offset`.
static inline uint32_t* places_of(void* data, int64_t numel, int64_t offset) {
  return reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(data) + code_bytes(numel)) + offset / kMomentBlock;
}

template <class Code>
static float* edit_moment(void* data, DType dtype, int64_t numel, int64_t offset, int64_t n, TileBuffer& buffer) {
  if (dtype != DType::kPacked) return edit(data, dtype, offset, n, buffer);
  unpack<Code>(static_cast<const uint8_t*>(data) + offset, places_of(data, numel, offset), buffer.values, n);
  return buffer.values;
}

// Stores a tile in a dtype of its own, by numbers drawn where that is lower precision.
static void store_drawn(const float* x, void* data, DType dtype, int64_t offset, int64_t n, const Drawn* drawn) {
  if (drawn == nullptr || dtype != DType::kBFloat16) return store(x, data, dtype, offset, n);
  uint16_t* to = static_cast<uint16_t*>(data) + offset;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<uint16_t>(drawn_bfloat16(bits_from_float(x[i]), drawn->numbers[i]));
}

template <class Code>
static void store_moment(const float* x, void* data, DType dtype, int64_t numel, int64_t offset, int64_t n, const Drawn* drawn) {
  if (dtype == DType::kPacked)
    pack<Code>(x, static_cast<uint8_t*>(data) + offset, places_of(data, numel, offset), n, drawn);
  else
    store_drawn(x, data, dtype, offset, n, drawn);
}

template <class Functor>
static void rounded_step_block(const Block<Functor::kStates + 3>& block, Functor functor, float each, const Rounding& rounding,
                               int64_t index, bool writes_lower, bool streams) {
  constexpr int kStates = Functor::kStates, kLower = kStates + 2;
  const FlatTensor<kStates + 3>& tensor = *block.tensor;
  const auto data = tensor.data;
  const auto dtype = tensor.dtype;
  const float of_tensor = functor.each(each);
  const bool splits = is_rest(dtype[kLower]);
  const Philox philox = rounding.draws() ? rounding.numbers_of(index) : Philox{};
  TileBuffer g_buffer, p_buffer, a_buffer, b_buffer, lower_buffer;
  Drawn numbers;
  for (int64_t start = 0; start < block.size; start += kTile) {
    const int64_t offset = block.offset + start;
    const int64_t n = block.size - start < kTile ? block.size - start : kTile;
    const auto is_drawn = [&](int list) {
      return rounding.draws() && (dtype[list] == DType::kPacked || dtype[list] == DType::kBFloat16);
    };
    const Source from = source(data[0], dtype[0], offset, n, g_buffer);
    const Sink to = sink(data[kLower], dtype[kLower], offset, lower_buffer, streams);
    const bool fuses_lower = writes_lower && !splits && to.is_bfloat16;
    const float* g = static_cast<const float*>(from.data);
    const BFloat16* narrow_g = static_cast<const BFloat16*>(from.data);
    BFloat16* lower = static_cast<BFloat16*>(to.data);
    float* p = splits ? edit_split(data[1], data[kLower], dtype[kLower], offset, n, p_buffer)
                      : edit(data[1], dtype[1], offset, n, p_buffer);
    float* a = kStates > 0 ? edit_moment<SignedCode>(data[2], dtype[2], tensor.numel, offset, n, a_buffer) : nullptr;
    float* b = kStates > 1 ? edit_moment<UnsignedCode>(data[3], dtype[3], tensor.numel, offset, n, b_buffer) : nullptr;
    if (from.is_bfloat16)
      fuses_lower ? step_tile<true>(narrow_g, p, a, b, lower, n, functor, of_tensor)
                  : step_tile<false>(narrow_g, p, a, b, lower, n, functor, of_tensor);
    else
      fuses_lower ? step_tile<true>(g, p, a, b, lower, n, functor, of_tensor)
                  : step_tile<false>(g, p, a, b, lower, n, functor, of_tensor);
    if (splits) {
      store_split(p, data[1], data[kLower], dtype[kLower], offset, n);
    } else {
      const bool draws = rounding.params && is_drawn(1);
      if (draws) draw(philox, kParam, offset, n, numbers);
      store_drawn(p, data[1], dtype[1], offset, n, draws ? &numbers : nullptr);
    }
    const bool draws = (kStates > 0 && is_drawn(2)) || (kStates > 1 && is_drawn(3));
    if (draws) draw(philox, kMoments, offset, n, numbers);
    const Drawn* drawn = draws ? &numbers : nullptr;
    if (kStates > 0) store_moment<SignedCode>(a, data[2], dtype[2], tensor.numel, offset, n, drawn);
    if (kStates > 1) store_moment<UnsignedCode>(b, data[3], dtype[3], tensor.numel, offset, n, drawn);
    if (fuses_lower)
      finish(to, data[kLower], dtype[kLower], offset, n, streams);
    else if (writes_lower && !splits)
      store(p, data[kLower], dtype[kLower], offset, n, streams);
  }
  finish_streams(writes_lower && streams);
}

}  // namespace AMPKIT_CAPABILITY
}  // namespace ampkit
