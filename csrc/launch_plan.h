// How lists of tensors are packed into kernel launches: code without CUDA, so that any machine can test it.
//
// A launch carries a table of at most max_tensors tensors in its arguments, and has a block for every chunk of each. A block finds
// its tensor in prefix sums: a table with an entry for each block would have room for a thousand. Tensors without
// elements take no slot, and a launch is made only for a block: none is ever pending or empty.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "functors/macros.h"

namespace ampkit {

struct Launch {
  std::vector<int64_t> tensors;          // tensors[slot] is an index into the lists
  std::vector<int64_t> first_blocks{0};  // of each slot, and after the last one the number of all blocks
};

inline int64_t chunks_of(int64_t size, int64_t chunk_size) { return size / chunk_size + (size % chunk_size != 0); }

inline std::vector<Launch> pack_launches(const std::vector<int64_t>& sizes, int64_t chunk_size, size_t max_tensors) {
  std::vector<Launch> launches;
  for (size_t tensor = 0; tensor < sizes.size(); ++tensor) {
    const int64_t chunks = chunks_of(sizes[tensor], chunk_size);
    if (chunks == 0) continue;
    if (launches.empty() || launches.back().tensors.size() == max_tensors) launches.emplace_back();
    launches.back().tensors.push_back(static_cast<int64_t>(tensor));
    launches.back().first_blocks.push_back(launches.back().first_blocks.back() + chunks);
  }
  return launches;
}

// The slot that a block works on: the last of these that begins there or before.
template <class Integer>
AMPKIT_INLINE int slot_of(const Integer* first_blocks, int slots, Integer block) {
  int slot = 0;
  for (int beyond = slots; beyond - slot > 1;) {
    const int middle = (slot + beyond) / 2;
    if (first_blocks[middle] <= block)
      slot = middle;
    else
      beyond = middle;
  }
  return slot;
}

}  // namespace ampkit
