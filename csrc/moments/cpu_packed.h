// Packed moments (moments/format.h) by vectors: packed_tile, a step over whole blocks of them, in one loop from codes to codes;
// and pack() and unpack(), for incomplete blocks, and beside moments that are not packed. Included once per instruction
// set, by moments/cpu_step_block.h.
namespace ampkit {
namespace AMPKIT_CAPABILITY {

// A moment in a tensor, from some element on.
struct PackedMoment {
  uint8_t* codes;
  uint32_t* highest;  // of its blocks
};

static inline PackedMoment packed_moment(void* data, int64_t numel, int64_t offset) {
  uint8_t* codes = static_cast<uint8_t*>(data);
  return {codes + offset, reinterpret_cast<uint32_t*>(codes + code_bytes(numel)) + offset / kMomentBlock};
}

template <class Code>
static void unpack(const PackedMoment& from, float* to, int64_t n) {
  for (int64_t start = 0; start < n; start += kMomentBlock) {
    const int64_t end = n - start < kMomentBlock ? n : start + kMomentBlock;
    const uint32_t base = base_of<Code>(from.highest[start / kMomentBlock] >> kDropped);
#pragma GCC ivdep
    for (int64_t i = start; i < end; ++i) to[i] = float_of_bits(Code::decode(from.codes[i], base));
  }
}

template <class Code>
static void pack(const float* x, const PackedMoment& to, int64_t n, const Drawn* drawn) {
  for (int64_t start = 0; start < n; start += kMomentBlock) {
    const int64_t count = n - start < kMomentBlock ? n - start : kMomentBlock;
    uint32_t places[kMomentBlock], found = 0;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t dither = drawn == nullptr ? kHalfPlace : place_dither(drawn->number(start + i));
      places[i] = Code::place(float_bits(x[start + i]), dither);
      found = places[i] > found ? places[i] : found;
    }
    const uint32_t base = base_of<Code>(found);
    for (int64_t i = 0; i < count; ++i)
      to.codes[start + i] = static_cast<uint8_t>(Code::encode(float_bits(x[start + i]), places[i], base));
    to.highest[start / kMomentBlock] = found << kDropped;
  }
}

#if AMPKIT_LANES > 4
// Two registers of words become one of places, 16 bits each, in another order, and two of these one of codes.
constexpr int kPlaces = 2 * kLanes, kPairs = kMomentBlock / kPlaces;
typedef Register Pair[2];

AMPKIT_VECTOR_INLINE Register all_words(uint32_t x) { return AMPKIT_INTRINSIC(set1_epi32)(static_cast<int>(x)); }
AMPKIT_VECTOR_INLINE Register all_places(uint32_t x) { return AMPKIT_INTRINSIC(set1_epi16)(static_cast<int16_t>(x)); }
AMPKIT_VECTOR_INLINE Register larger(Register x, Register y) { return AMPKIT_INTRINSIC(max_epu16)(x, y); }
AMPKIT_VECTOR_INLINE Register smaller(Register x, Register y) { return AMPKIT_INTRINSIC(min_epu16)(x, y); }
// Negative words become 0.
AMPKIT_VECTOR_INLINE Register narrowed(Register x, Register y) { return AMPKIT_INTRINSIC(packus_epi32)(x, y); }

#if AMPKIT_LANES == 8
template <class Code>
AMPKIT_VECTOR_INLINE Register load_codes(const uint8_t* x) {
  const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(x));
  return Code::kSigned ? _mm256_cvtepi8_epi32(codes) : _mm256_cvtepu8_epi32(codes);
}
AMPKIT_VECTOR_INLINE Register in_order(Register codes) {
  return _mm256_permutevar8x32_epi32(codes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
AMPKIT_VECTOR_INLINE bool any_exceeds(Register places, uint32_t limit) {
  return _mm256_movemask_epi8(_mm256_cmpgt_epi16(places, all_places(limit))) != 0;
}
AMPKIT_VECTOR_INLINE __m128i eighth(Register places) {
  return _mm_max_epu16(_mm256_castsi256_si128(places), _mm256_extracti128_si256(places, 1));
}
#else
template <class Code>
AMPKIT_VECTOR_INLINE Register load_codes(const uint8_t* x) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  return Code::kSigned ? _mm512_cvtepi8_epi32(codes) : _mm512_cvtepu8_epi32(codes);
}
AMPKIT_VECTOR_INLINE Register in_order(Register codes) {
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), codes);
}
AMPKIT_VECTOR_INLINE bool any_exceeds(Register places, uint32_t limit) {
  return _mm512_cmpgt_epu16_mask(places, all_places(limit)) != 0;
}
AMPKIT_VECTOR_INLINE __m128i eighth(Register places) {
  const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(places), _mm512_extracti64x4_epi64(places, 1));
  return _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}
#endif
// Only the lowest of eight has an instruction.
AMPKIT_VECTOR_INLINE uint32_t highest_of(Register places) {
  return 0xffffu ^ (static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_minpos_epu16(~eighth(places)))) & 0xffffu);
}

AMPKIT_VECTOR_INLINE Register unless_zero(Register of, Register x) {
#if AMPKIT_LANES == 16
  return _mm512_maskz_mov_epi32(_mm512_test_epi32_mask(of, of), x);
#else
  return ~AMPKIT_INTRINSIC(cmpeq_epi32)(of, Register{}) & x;
#endif
}

// Code::decode
template <class Code>
AMPKIT_VECTOR_INLINE Vector decoded(const uint8_t* codes, Register base) {
  const Register code = load_codes<Code>(codes), low = Code::kSigned ? code & all_words(0x7f) : code;
  const Register bits = unless_zero(low, AMPKIT_INTRINSIC(slli_epi32)(AMPKIT_INTRINSIC(add_epi32)(low, base), kDropped));
  return reinterpret_cast<Vector>(Code::kSigned ? bits | (code & all_words(0x80000000u)) : bits);
}

// place_of, if the place is below those of inf and NaN.
AMPKIT_VECTOR_INLINE Register place_of_finite(Register bits, Register dither) {
  return AMPKIT_INTRINSIC(srli_epi32)(AMPKIT_INTRINSIC(add_epi32)(bits & all_words(0x7fffffffu), dither), kDropped);
}

static __attribute__((noinline, cold)) Register place_of_any(Register bits, Register dither) {
  uint32_t each[kLanes], dithers[kLanes];
  __builtin_memcpy(each, &bits, sizeof(each));
  __builtin_memcpy(dithers, &dither, sizeof(dithers));
  for (int k = 0; k < kLanes; ++k) each[k] = place_of(each[k] & 0x7fffffffu, dithers[k]);
  __builtin_memcpy(&bits, each, sizeof(bits));
  return bits;
}

// A block of a moment during a step: decoded by its old highest place, encoded by the new one.
template <class Code>
struct MovingBlock {
  Register base, most = {}, places[kPairs];

  explicit AMPKIT_INLINE MovingBlock(uint32_t highest) : base(all_words(base_of<Code>(highest >> kDropped))) {}

  // Keeps pair j and its places: in a second moment every value but 0 has at least place 1; signs go to the highest bits.
  AMPKIT_INLINE void keep(int j, const Pair& bits, Register found) {
    const Register mask = all_words(0x7fffffffu);
    if (!Code::kSigned) found = larger(found, smaller(narrowed(bits[0] & mask, bits[1] & mask), all_places(1)));
    most = larger(most, found);
    if (Code::kSigned) found = found | (AMPKIT_INTRINSIC(packs_epi32)(bits[0], bits[1]) & all_places(0x8000));
    places[j] = found;
  }

  // Code::encode, of the places that keep() has stored.
  static AMPKIT_INLINE Register encoded(Register places, Register base) {
    if (!Code::kSigned) return larger(AMPKIT_INTRINSIC(subs_epu16)(places, base), smaller(places, all_places(1)));
    const Register sign = AMPKIT_INTRINSIC(srli_epi16)(places, 8) & all_places(0x80);
    return AMPKIT_INTRINSIC(subs_epu16)(places & all_places(0x7fff), base) | sign;
  }

  AMPKIT_INLINE void write(uint8_t* codes, uint32_t* highest) const {
    const uint32_t found = highest_of(most);
    const Register all = all_places(base_of<Code>(found));
#pragma GCC unroll 4
    for (int j = 0; j < kPairs; j += 2) {
      const Register both = in_order(AMPKIT_INTRINSIC(packus_epi16)(encoded(places[j], all), encoded(places[j + 1], all)));
      __builtin_memcpy(codes + j * kPlaces, &both, sizeof(both));
    }
    *highest = found << kDropped;
  }
};

// The block of moments that begins at element `start` of a tile. Decoding and encoding run beside the functor's root and
// quotient, which are slow; nothing but codes goes through memory.
template <bool kDraws, class Grad, class Functor>
static void packed_block(const Grad* g, float* p, const PackedMoment& first, const PackedMoment& second, int64_t start,
                         Functor functor, float of_tensor, const Drawn* drawn) {
  constexpr bool kSecond = Functor::kStates > 1;
  const int64_t block = start / kMomentBlock;
  MovingBlock<SignedCode> a(first.highest[block]);
  MovingBlock<UnsignedCode> b(kSecond ? second.highest[block] : 0);
  for (int j = 0; j < kPairs; ++j) {
    Pair a_bits, b_bits, dither;
#pragma GCC unroll 2
    for (int k = 0; k < 2; ++k) {
      const int64_t i = start + j * kPlaces + k * kLanes;
      alignas(64) float gs[kLanes], ps[kLanes], as[kLanes], bs[kLanes];
      store_vector(gs, load_vector(g + i));
      store_vector(ps, load_vector(p + i));
      store_vector(as, decoded<SignedCode>(first.codes + i, a.base));
      store_vector(bs, kSecond ? decoded<UnsignedCode>(second.codes + i, b.base) : Vector{});
#pragma GCC unroll 1  // a vector of floats, in registers: unrolled it would stay eight floats
#pragma GCC ivdep
      for (int lane = 0; lane < kLanes; ++lane) functor(gs[lane], ps[lane], as[lane], bs[lane], of_tensor);
      store_vector(p + i, load_vector(ps));
      __builtin_memcpy(&a_bits[k], as, sizeof(Register));
      __builtin_memcpy(&b_bits[k], bs, sizeof(Register));
      dither[k] = all_words(kHalfPlace);
      if (kDraws) dither[k] = reinterpret_cast<Register>(numbers(*drawn, i)) & all_words(kDitherMask);
    }
    Register a_places = narrowed(place_of_finite(a_bits[0], dither[0]), place_of_finite(a_bits[1], dither[1]));
    Register b_places = narrowed(place_of_finite(b_bits[0], dither[0]), place_of_finite(b_bits[1], dither[1]));
    if (__builtin_expect(any_exceeds(larger(a_places, b_places), kInfinitePlace - 2), 0)) {
      a_places = narrowed(place_of_any(a_bits[0], dither[0]), place_of_any(a_bits[1], dither[1]));
      b_places = narrowed(place_of_any(b_bits[0], dither[0]), place_of_any(b_bits[1], dither[1]));
    }
    a.keep(j, a_bits, a_places);
    if (kSecond) b.keep(j, b_bits, b_places);
  }
  a.write(first.codes + start, first.highest + block);
  if (kSecond) b.write(second.codes + start, second.highest + block);
}

// n is a multiple of kMomentBlock.
template <class Grad, class Functor, class Next>
static void packed_tile(const Grad* g, float* p, const PackedMoment& first, const PackedMoment& second, int64_t n, Functor functor,
                        float of_tensor, const Drawn* drawn, const Next& next) {
  for (int64_t start = 0; start < n; start += kMomentBlock) {
    next.prefetch(start, kMomentBlock);
    drawn != nullptr ? packed_block<true>(g, p, first, second, start, functor, of_tensor, drawn)
                     : packed_block<false>(g, p, first, second, start, functor, of_tensor, drawn);
  }
}
#endif

}  // namespace AMPKIT_CAPABILITY
}  // namespace ampkit
