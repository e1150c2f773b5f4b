// multi_tensor_join and multi_tensor_split on the CPU: Note [weights and rests]. Memory traffic: 8 bytes an element, 4 each way.
#ifdef AMPKIT_CAPABILITY

namespace ampkit {
namespace AMPKIT_CAPABILITY {

// Tile by tile, since values that are not float32 go through a buffer.
static void join_block(const Block<3>& block) {
  const auto& [data, dtype, numel] = *block.tensor;
  TileBuffer buffer;
  for (int64_t start = 0; start < block.size; start += kTile) {
    const int64_t offset = block.offset + start, n = block.size - start < kTile ? block.size - start : kTile;
    float* to = target(data[2], dtype[2], offset, buffer);
    visit_rests(data[0], data[1], dtype[0], offset, [&](auto from) { from.copy_to(to, n); });
    store(to, data[2], dtype[2], offset, n);
  }
}

static void split_block(const Block<3>& block) {
  const auto& [data, dtype, numel] = *block.tensor;
  TileBuffer buffer;
  for (int64_t start = 0; start < block.size; start += kTile) {
    const int64_t offset = block.offset + start, n = block.size - start < kTile ? block.size - start : kTile;
    const float* from = load(data[0], dtype[0], offset, n, buffer);
    visit_rests(data[1], data[2], dtype[1], offset, [&](auto to) { to.store(from, n); });
  }
}

}  // namespace AMPKIT_CAPABILITY
}  // namespace ampkit

#else

#include "cpu/multi_tensor_apply.h"
#include "ops.h"

#define AMPKIT_SOURCE "cpu/multi_tensor_split.cpp"
#include "cpu/each_capability.h"

namespace ampkit {
namespace {

template <class Kernel>
void run(TensorLists<3> lists, const Kernel& kernel) {
  const auto blocks = blocks_of(lists.flat());
  for_each_block(blocks, [&](int64_t i) { kernel(blocks[i]); });
}

}  // namespace

void multi_tensor_join_cpu(const TensorList& weights, const TensorList& rests, const TensorList& outputs) {
  run(join_lists("multi_tensor_join", weights, rests, outputs), AMPKIT_VARIANT(join_block));
}

void multi_tensor_split_cpu(const TensorList& values, const TensorList& weights, const TensorList& rests) {
  run(split_lists("multi_tensor_split", values, weights, rests), AMPKIT_VARIANT(split_block));
}

}  // namespace ampkit

#endif
