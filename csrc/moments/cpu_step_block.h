// rounded_step_block: step_block for packed moments (moments/format.h), or for results that are rounded by numbers drawn
// (moments/rounding.h). Included once per instruction set, by cpu/each_capability.h.
//
// If all moments are packed, one loop processes whole blocks of them (moments/cpu_packed.h). Otherwise tiles are float32 as
// everywhere: moments are unpacked into them and packed again. A tile is a whole number of blocks.
#include "cpu/step_block.h"
#include "moments/cpu_draws.h"
#include "moments/cpu_packed.h"

namespace ampkit {
namespace AMPKIT_CAPABILITY {

static_assert(kTile % kMomentBlock == 0 && kMomentBlock % kDraws == 0, "tiles hold whole blocks of moments");

template <class Code>
static float* edit_moment(void* data, DType dtype, int64_t numel, int64_t offset, int64_t n, TileBuffer& buffer) {
  if (dtype != DType::kPacked) return load(data, dtype, offset, n, buffer);
  unpack<Code>(packed_moment(data, numel, offset), buffer.values, n);
  return buffer.values;
}

// drawn_bfloat16, for a register of values.
AMPKIT_VECTOR_INLINE Words drawn_words(Words bits, Words drawn) {
  const Words magnitude = bits & 0x7fffffff;
  const Words rounded = (magnitude + (drawn & 0xffff)) >> 16;
  const Words finite = either(is_above(rounded, 0x7f7f), Words{} + 0x7f7f, rounded);
  const Words other = either(is_above(magnitude, 0x7f800000), Words{} + 0x7fc0, Words{} + 0x7f80);
  return either(is_above(magnitude, 0x7f7fffff), other, finite) | (bits >> 16 & 0x8000);
}

// Stores a tile in its dtype, rounded by numbers drawn if that is lower precision.
static void store_drawn(const float* x, void* data, DType dtype, int64_t offset, int64_t n, const Drawn* drawn) {
  if (drawn == nullptr || dtype != DType::kBFloat16) return store(x, data, dtype, offset, n);
  uint16_t* to = static_cast<uint16_t*>(data) + offset;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store_words(to + i, drawn_words(words_of(load_vector(x + i)), numbers(*drawn, i)));
  for (; i < n; ++i) to[i] = static_cast<uint16_t>(drawn_bfloat16(float_bits(x[i]), drawn->number(i)));
}

template <class Code>
static void store_moment(const float* x, void* data, DType dtype, int64_t numel, int64_t offset, int64_t n, const Drawn* drawn) {
  if (dtype == DType::kPacked)
    pack<Code>(x, packed_moment(data, numel, offset), n, drawn);
  else
    store_drawn(x, data, dtype, offset, n, drawn);
}

template <class Functor>
static void rounded_step_block(const Block<Functor::kStates + 3>& block, Functor functor, float each, const Rounding& rounding,
                               int64_t index, bool writes_lower) {
  constexpr int kStates = Functor::kStates, kLower = kStates + 2;
  const FlatTensor<kStates + 3>& tensor = *block.tensor;
  const auto data = tensor.data;
  const auto dtype = tensor.dtype;
  const float of_tensor = functor.each(each);
  const Philox philox = rounding.draws() ? rounding.numbers_of(index) : Philox{};
  const auto is_drawn = [&](int list) {
    return rounding.draws() && (dtype[list] == DType::kPacked || dtype[list] == DType::kBFloat16);
  };
  const bool draws_moments = (kStates > 0 && is_drawn(2)) || (kStates > 1 && is_drawn(3));
  const bool draws_param = !is_rest(dtype[kLower]) && rounding.params && is_drawn(1);
  const bool packs = kLanes > 4 && kStates > 0 && dtype[2] == DType::kPacked &&
                     (kStates == 1 || dtype[kStates + 1] == DType::kPacked);
  TileBuffer g_buffer, p_buffer, a_buffer, b_buffer;
  Drawn for_moments, for_param;
  int64_t n = 0;
  for (int64_t start = 0; start < block.size; start += n) {
    const int64_t offset = block.offset + start;
    n = block.size - start < kTile ? block.size - start : kTile;
    if (packs && n > kMomentBlock) n -= n % kMomentBlock;
    [[maybe_unused]] const bool whole = packs && n % kMomentBlock == 0;
    if (draws_moments) draw(philox, kMoments, offset, n, for_moments);
    if (draws_param) draw(philox, kParam, offset, n, for_param);
    const Drawn* drawn = draws_moments ? &for_moments : nullptr;
    const NextTile<kStates + 3> next(tensor, offset);
    const auto update = [&](const auto* g, auto params) {
#if AMPKIT_LANES > 4
      if constexpr (kStates > 0)
        if (whole) {
          const PackedMoment a = packed_moment(data[2], tensor.numel, offset);
          const PackedMoment b = kStates > 1 ? packed_moment(data[kStates + 1], tensor.numel, offset) : PackedMoment{};
          float* p = params.edit(n, p_buffer);
          packed_tile(g, p, a, b, n, functor, of_tensor, drawn, next);
          return params.store(p, n);
        }
#endif
      float* a = kStates > 0 ? edit_moment<SignedCode>(data[2], dtype[2], tensor.numel, offset, n, a_buffer) : nullptr;
      float* b = kStates > 1 ? edit_moment<UnsignedCode>(data[3], dtype[3], tensor.numel, offset, n, b_buffer) : nullptr;
      step_tile(g, params, a, b, n, functor, of_tensor, next);
      if (kStates > 0) store_moment<SignedCode>(a, data[2], dtype[2], tensor.numel, offset, n, drawn);
      if (kStates > 1) store_moment<UnsignedCode>(b, data[3], dtype[3], tensor.numel, offset, n, drawn);
    };
    visit_step<Functor>(tensor, offset, n, g_buffer, p_buffer, update, [&](const float* p) {
      store_drawn(p, data[1], dtype[1], offset, n, draws_param ? &for_param : nullptr);
      if (writes_lower) store(p, data[kLower], dtype[kLower], offset, n);
    });
  }
}

}  // namespace AMPKIT_CAPABILITY
}  // namespace ampkit
