// rounded_step_block: step_block where moments are packed (functors/moments.h), or results are rounded by numbers drawn
// (functors/rounding.h). Included once per instruction set, by cpu/each_capability.h.
//
// Tiles are float32 as everywhere: moments are unpacked into them and packed again. A tile is a whole number of their blocks.
#include "cpu/step_block.h"

namespace ampkit {
namespace AMPKIT_CAPABILITY {

static_assert(kTile % kMomentBlock == 0 && kMomentBlock % kDraws == 0, "tiles hold whole blocks of moments");

struct Drawn {
  uint16_t numbers[kTile];
};

static void draw(const Philox philox, uint32_t stream, int64_t offset, int64_t n, Drawn& drawn) {
  constexpr int64_t kCalls = kTile / kDraws;
  uint32_t words[4][kCalls];
  const int64_t first = offset / kDraws, calls = (n + kDraws - 1) / kDraws;
  for (int64_t call = 0; call < calls; ++call) {
    uint32_t x[4];
    philox(first + call, stream, x);
    for (int word = 0; word < 4; ++word) words[word][call] = x[word];
  }
  for (int64_t call = 0; call < calls; ++call)
    for (int word = 0; word < 4; ++word) {
      drawn.numbers[call * kDraws + 2 * word] = static_cast<uint16_t>(words[word][call]);
      drawn.numbers[call * kDraws + 2 * word + 1] = static_cast<uint16_t>(words[word][call] >> 16);
    }
}

template <class Code>
static void unpack(const uint8_t* codes, const uint32_t* highest, float* to, int64_t n) {
  for (int64_t start = 0; start < n; start += kMomentBlock) {
    const int64_t count = n - start < kMomentBlock ? n - start : kMomentBlock;
    const uint32_t base = base_of<Code>(*highest++ >> kDropped);
    for (int64_t i = start; i < start + count; ++i) to[i] = float_from_bits(Code::decode(codes[i], base));
  }
}

template <class Code>
static void pack(const float* x, uint8_t* codes, uint32_t* highest, int64_t n, const Drawn* drawn) {
  for (int64_t start = 0; start < n; start += kMomentBlock) {
    const int64_t count = n - start < kMomentBlock ? n - start : kMomentBlock;
    uint32_t places[kMomentBlock];
    if (drawn != nullptr)
      for (int64_t i = 0; i < count; ++i)
        places[i] = Code::place(bits_from_float(x[start + i]), place_dither(drawn->numbers[start + i]));
    else
      for (int64_t i = 0; i < count; ++i) places[i] = Code::place(bits_from_float(x[start + i]), kHalfPlace);
    uint32_t found = 0;
    for (int64_t i = 0; i < count; ++i) found = places[i] > found ? places[i] : found;
    const uint32_t base = base_of<Code>(found);
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
  TileBuffer g_buffer, p_buffer, a_buffer, b_buffer;
  Drawn numbers;
  for (int64_t start = 0; start < block.size; start += kTile) {
    const int64_t offset = block.offset + start;
    const int64_t n = block.size - start < kTile ? block.size - start : kTile;
    const auto drawn = [&](bool asked, DType of, uint32_t stream) -> const Drawn* {
      if (!asked || !rounding.draws() || (of != DType::kPacked && of != DType::kBFloat16)) return nullptr;
      draw(philox, stream, offset, n, numbers);
      return &numbers;
    };
    const float* g = load(data[0], dtype[0], offset, n, g_buffer);
    float* p = splits ? edit_split(data[1], data[kLower], dtype[kLower], offset, n, p_buffer)
                      : edit(data[1], dtype[1], offset, n, p_buffer);
    float* a = kStates > 0 ? edit_moment<SignedCode>(data[2], dtype[2], tensor.numel, offset, n, a_buffer) : nullptr;
    float* b = kStates > 1 ? edit_moment<UnsignedCode>(data[3], dtype[3], tensor.numel, offset, n, b_buffer) : nullptr;
    step_tile<false>(g, p, a, b, static_cast<BFloat16*>(nullptr), n, functor, of_tensor);
    if (splits)
      store_split(p, data[1], data[kLower], dtype[kLower], offset, n);
    else
      store_drawn(p, data[1], dtype[1], offset, n, drawn(rounding.params, dtype[1], kParam));
    if (kStates > 0)
      store_moment<SignedCode>(a, data[2], dtype[2], tensor.numel, offset, n, drawn(true, dtype[2], kFirstMoment));
    if (kStates > 1)
      store_moment<UnsignedCode>(b, data[3], dtype[3], tensor.numel, offset, n, drawn(true, dtype[3], kSecondMoment));
    if (writes_lower && !splits) store(p, data[kLower], dtype[kLower], offset, n, streams);
  }
  finish_streams(writes_lower && streams);
}

}  // namespace AMPKIT_CAPABILITY
}  // namespace ampkit
