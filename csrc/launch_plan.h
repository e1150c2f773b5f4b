// How lists of tensors are packed into kernel launches: host code without CUDA, so that any machine can test it.
//
// A launch carries a table of at most max_tensors tensors and max_blocks blocks in its arguments. A block works on one
// chunk of one tensor. Tensors without elements take no slot, and a launch is made only when there is a block to put
// into it: nothing is ever left pending, and no empty launch goes out. A tensor with more chunks than a launch has
// blocks continues in the next launch, in slot 0.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ampkit {

struct PlannedBlock {
  int64_t slot;
  int64_t chunk;
};

struct Launch {
  std::vector<int64_t> tensors;  // tensors[slot] is an index into the lists
  std::vector<PlannedBlock> blocks;
};

inline int64_t chunks_of(int64_t size, int64_t chunk_size) { return size / chunk_size + (size % chunk_size != 0); }

inline std::vector<Launch> pack_launches(const std::vector<int64_t>& sizes, int64_t chunk_size, size_t max_tensors,
                                         size_t max_blocks) {
  std::vector<Launch> launches;
  for (size_t tensor = 0; tensor < sizes.size(); ++tensor) {
    const int64_t chunks = chunks_of(sizes[tensor], chunk_size);
    bool has_slot = false;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const bool full = launches.empty() || launches.back().blocks.size() == max_blocks ||
                        (!has_slot && launches.back().tensors.size() == max_tensors);
      if (full) launches.emplace_back();
      if (full || !has_slot) launches.back().tensors.push_back(static_cast<int64_t>(tensor));
      has_slot = true;
      launches.back().blocks.push_back({static_cast<int64_t>(launches.back().tensors.size()) - 1, chunk});
    }
  }
  return launches;
}

}  // namespace ampkit
