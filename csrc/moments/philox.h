// Random numbers for rounding: a function of a seed and of where a number is used, so that no state is kept between steps
// and every device draws the same (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3": Philox4x32-7, the fewest
// rounds that pass all of BigCrush).
#pragma once

#include <cstdint>

#include "functors/macros.h"

namespace ampkit {

constexpr int kDraws = 16;  // numbers from one call
constexpr int kRounds = 7;

struct Philox {
  uint32_t seed_low, seed_high;
  uint32_t step, position;  // of the parameter

  // Element i of list `stream` draws number i % kDraws of call i / kDraws, see number_of.
  AMPKIT_INLINE void operator()(int64_t call, uint32_t stream, uint32_t (&x)[4]) const {
    x[0] = static_cast<uint32_t>(call);
    x[1] = static_cast<uint32_t>(call >> 32) | stream << 24;
    x[2] = position;
    x[3] = step;
    uint32_t key_low = seed_low, key_high = seed_high;
    for (int round = 0; round < kRounds; ++round) {
      const uint64_t even = static_cast<uint64_t>(0xD2511F53u) * x[0], odd = static_cast<uint64_t>(0xCD9E8D57u) * x[2];
      const uint32_t second = x[1], fourth = x[3];
      x[0] = static_cast<uint32_t>(odd >> 32) ^ second ^ key_low;
      x[1] = static_cast<uint32_t>(odd);
      x[2] = static_cast<uint32_t>(even >> 32) ^ fourth ^ key_high;
      x[3] = static_cast<uint32_t>(even);
      key_low += 0x9E3779B9u;
      key_high += 0xBB67AE85u;
    }
  }
};

// Number k of the four from one word: the word, rotated by k bytes. In each of them all values are equally likely, so that each
// rounds right in the mean. Users take the lowest bits: of these 20, the upper 8, which nearly always decide, are different bits of
// the word for each k, and so independent.
AMPKIT_INLINE uint32_t number_of(uint32_t word, int k) { return k == 0 ? word : word << (8 * k) | word >> (32 - 8 * k); }

}  // namespace ampkit
