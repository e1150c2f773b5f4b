// multi_tensor_lamb on the CPU. Memory traffic, in two passes: gradients, parameters and moments read and moments written;
// then moments and parameters read, parameters and lower written. The directions between the passes are computed twice
// instead of being kept: reading the moments again costs no more, and needs no memory.
#ifdef AMPKIT_CAPABILITY

namespace ampkit {
namespace AMPKIT_CAPABILITY {

// Updates the moments; leaves the sums of squares of the parameters and of the directions.
static void lamb_moments(const Block<5>& block, LambFunctor functor, double* sums) {
  const FlatTensor<5>& tensor = *block.tensor;
  TileBuffer g_buffer, p_buffer, m_buffer, v_buffer, u_buffer;
  sums[0] = sums[1] = 0;
  for (int64_t start = 0; start < block.size; start += kTile) {
    const int64_t offset = block.offset + start;
    const int64_t n = block.size - start < kTile ? block.size - start : kTile;
    const float* g = load(tensor.data[0], tensor.dtype[0], offset, n, g_buffer);
    const float* p = load(tensor.data[1], tensor.dtype[1], offset, n, p_buffer);
    float* m = edit(tensor.data[2], tensor.dtype[2], offset, n, m_buffer);
    float* v = edit(tensor.data[3], tensor.dtype[3], offset, n, v_buffer);
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      float first = m[i], second = v[i];
      functor.update_moments(g[i], p[i], first, second);
      m[i] = first;
      v[i] = second;
    }
    store(m, tensor.data[2], tensor.dtype[2], offset, n);
    store(v, tensor.data[3], tensor.dtype[3], offset, n);
    // As the second pass will read them, should they be narrower.
    const float* first = load(tensor.data[2], tensor.dtype[2], offset, n, m_buffer);
    const float* second = load(tensor.data[3], tensor.dtype[3], offset, n, v_buffer);
    float* u = u_buffer.values;
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) u[i] = functor.direction(p[i], first[i], second[i]);
    sums[0] += sum_of_squares(p, n).sum;
    sums[1] += sum_of_squares(u, n).sum;
  }
}

static void lamb_move(const Block<5>& block, LambFunctor functor, float ratio, bool writes_lower, bool streams) {
  const FlatTensor<5>& tensor = *block.tensor;
  TileBuffer p_buffer, m_buffer, v_buffer;
  for (int64_t start = 0; start < block.size; start += kTile) {
    const int64_t offset = block.offset + start;
    const int64_t n = block.size - start < kTile ? block.size - start : kTile;
    float* p = edit(tensor.data[1], tensor.dtype[1], offset, n, p_buffer);
    const float* m = load(tensor.data[2], tensor.dtype[2], offset, n, m_buffer);
    const float* v = load(tensor.data[3], tensor.dtype[3], offset, n, v_buffer);
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) p[i] = p[i] - functor.lr * (functor.direction(p[i], m[i], v[i]) * ratio);
    store(p, tensor.data[1], tensor.dtype[1], offset, n);
    if (writes_lower) store(p, tensor.data[4], tensor.dtype[4], offset, n, streams);
  }
  finish_streams(writes_lower && streams);
}

}  // namespace AMPKIT_CAPABILITY
}  // namespace ampkit

#else

#include "cpu/multi_tensor_step.h"
#include "cpu/norms.h"

#define AMPKIT_SOURCE "cpu/multi_tensor_lamb.cpp"
#include "cpu/each_capability.h"

namespace ampkit {

void take_lamb_step(Step<LambFunctor>& step) {
  if (step.settings.skips()) return;
  const LambFunctor functor(step.settings);
  const auto& tensors = step.lists.flat();
  const auto blocks = blocks_of(tensors);
  const auto lamb_moments = AMPKIT_VARIANT(lamb_moments);
  const auto lamb_move = AMPKIT_VARIANT(lamb_move);
  std::vector<double> squares(2 * blocks.size());
  for_each_block(blocks, [&](int64_t i) { lamb_moments(blocks[i], functor, &squares[2 * i]); });

  std::vector<double> of_params(tensors.size()), of_directions(tensors.size());
  for (size_t i = 0; i < blocks.size(); ++i) {
    of_params[blocks[i].tensor - tensors.data()] += squares[2 * i];
    of_directions[blocks[i].tensor - tensors.data()] += squares[2 * i + 1];
  }
  const bool streams = exceeds_caches(blocks);
  for_each_block(blocks, [&](int64_t i) {
    const auto tensor = blocks[i].tensor - tensors.data();
    lamb_move(blocks[i], functor, lamb_ratio(of_params[tensor], of_directions[tensor]), step.writes_lower, streams);
  });
  step.lists.finish();
}

}  // namespace ampkit

#endif
