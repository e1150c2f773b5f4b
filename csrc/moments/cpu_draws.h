// draw() and numbers(): the numbers of moments/philox.h for a tile, by vectors. Included once per instruction set, by
// moments/cpu_step_block.h.
namespace ampkit {
namespace AMPKIT_CAPABILITY {

// An intrinsic of the present instruction set: the two sets differ in width alone. C++ operators combine bits.
#if AMPKIT_LANES == 16
#undef AMPKIT_INTRINSIC
#define AMPKIT_INTRINSIC(name) _mm512_##name
typedef __m512i Register;
#elif AMPKIT_LANES == 8
#undef AMPKIT_INTRINSIC
#define AMPKIT_INTRINSIC(name) _mm256_##name
typedef __m256i Register;
#endif

// Calls of Philox at once, each in the lower half of a lane of 64 bits: the upper halves are ignored. product_of_calls is of these
// halves. Of calls of which one stands behind the other in each 128 bits, first_calls and last_calls make whole calls.
#if AMPKIT_LANES > 4
typedef uint64_t Calls __attribute__((vector_size(4 * AMPKIT_LANES)));
AMPKIT_VECTOR_INLINE Calls product_of_calls(Calls x, Calls y) {
  return reinterpret_cast<Calls>(AMPKIT_INTRINSIC(mul_epu32)(reinterpret_cast<Register>(x), reinterpret_cast<Register>(y)));
}
AMPKIT_VECTOR_INLINE Register first_calls(Calls front, Calls back) {
  return AMPKIT_INTRINSIC(unpacklo_epi64)(reinterpret_cast<Register>(front), reinterpret_cast<Register>(back));
}
AMPKIT_VECTOR_INLINE Register last_calls(Calls front, Calls back) {
  return AMPKIT_INTRINSIC(unpackhi_epi64)(reinterpret_cast<Register>(front), reinterpret_cast<Register>(back));
}
#else
typedef uint64_t Calls;
static inline Calls product_of_calls(Calls x, Calls y) { return (x & 0xffffffffu) * (y & 0xffffffffu); }
static inline Calls first_calls(Calls front, Calls) { return front; }
static inline Calls last_calls(Calls, Calls back) { return back; }
#endif
constexpr int64_t kCallsAtOnce = sizeof(Calls) / 8;

// Four words to a call: element i has word i / 4, turned by i % 4 bytes.
struct Drawn {
  alignas(64) uint32_t words[kTile / 4];

  uint32_t number(int64_t i) const { return number_of(words[i / 4], static_cast<int>(i % 4)); }
};

// Like Philox::operator(), for the elements [offset, offset + n).
static void draw(const Philox philox, uint32_t stream, int64_t offset, int64_t n, Drawn& drawn) {
  alignas(64) uint64_t indices[kCallsAtOnce];
  for (int64_t i = 0; i < kCallsAtOnce; ++i) {
    const int64_t call = i / 2 + i % 2 * (kCallsAtOnce / 2);
    indices[i] = static_cast<uint64_t>(offset / kDraws + call);
  }
  Calls index;
  __builtin_memcpy(&index, indices, sizeof(index));
  for (int64_t call = 0; call * kDraws < n; call += kCallsAtOnce) {
    Calls x0 = index, x1 = index >> 32 | stream << 24;
    Calls x2 = Calls{} + philox.position, x3 = Calls{} + philox.step;
    uint32_t key_low = philox.seed_low, key_high = philox.seed_high;
#pragma GCC unroll 7
    for (int round = 0; round < kRounds; ++round) {
      const Calls even = product_of_calls(x0, Calls{} + 0xD2511F53u), odd = product_of_calls(x2, Calls{} + 0xCD9E8D57u);
      x0 = odd >> 32 ^ x1 ^ key_low;
      x2 = even >> 32 ^ x3 ^ key_high;
      x1 = odd;
      x3 = even;
      key_low += 0x9E3779B9u;
      key_high += 0xBB67AE85u;
    }
    const Calls front = (x0 & 0xffffffffu) | x1 << 32, back = (x2 & 0xffffffffu) | x3 << 32;
    const auto first = first_calls(front, back), last = last_calls(front, back);
    __builtin_memcpy(drawn.words + call * 4, &first, sizeof(first));
    __builtin_memcpy(drawn.words + call * 4 + 2 * kCallsAtOnce, &last, sizeof(last));
    index += kCallsAtOnce;
  }
}

// The numbers of elements [i, i + kLanes); i is a multiple of kLanes.
AMPKIT_VECTOR_INLINE Words numbers(const Drawn& drawn, int64_t i) {
#if AMPKIT_LANES > 4
  const uint32_t* words = drawn.words + i / 4;
  const __m128i turns = _mm_setr_epi8(0, 1, 2, 3, 3, 0, 1, 2, 2, 3, 0, 1, 1, 2, 3, 0);
#if AMPKIT_LANES == 8
  uint64_t pair;
  __builtin_memcpy(&pair, words, sizeof(pair));
  const __m256i each = _mm256_set_m128i(_mm_or_si128(turns, _mm_set1_epi8(4)), turns);
  return reinterpret_cast<Words>(_mm256_shuffle_epi8(_mm256_set1_epi64x(static_cast<long long>(pair)), each));
#else
  const __m512i each = _mm512_or_si512(_mm512_broadcast_i32x4(turns), _mm512_set_epi64(0x0c0c0c0c0c0c0c0c, 0x0c0c0c0c0c0c0c0c,
                                       0x0808080808080808, 0x0808080808080808, 0x0404040404040404, 0x0404040404040404, 0, 0));
  return reinterpret_cast<Words>(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(*reinterpret_cast<const __m128i*>(words)), each));
#endif
#else
  Words found;
  uint32_t lanes[kLanes];
  for (int k = 0; k < kLanes; ++k) lanes[k] = drawn.number(i + k);
  __builtin_memcpy(&found, lanes, sizeof(found));
  return found;
#endif
}

}  // namespace AMPKIT_CAPABILITY
}  // namespace ampkit
