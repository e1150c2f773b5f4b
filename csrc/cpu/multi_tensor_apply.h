// The one driver of the CPU kernels: a single parallel region over all tensors, whose threads take blocks off a counter.
//
// A region per tensor would fork and join for each of a model's many small tensors, and wait for the slowest
// thread each time another job holds a core. With the counter a late thread takes fewer blocks.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "tensor_lists.h"

namespace ampkit {

// One piece of one tensor, at most kBlockSize elements.
template <int kDepth>
struct Block {
  const FlatTensor<kDepth>* tensor;
  int64_t offset;
  int64_t size;
};

constexpr int64_t kBlockSize = 64 * 1024;
// With fewer elements than kSerialSize a second thread costs more than it gains. So it does with blocks smaller than kSmallBlock
// on average: there is less to do on them than one thread has done to pack them.
constexpr int64_t kSerialSize = 128 * 1024;
constexpr int64_t kSmallBlock = 256;

template <int kDepth>
std::vector<Block<kDepth>> blocks_of(const std::vector<FlatTensor<kDepth>>& tensors) {
  std::vector<Block<kDepth>> blocks;
  for (const FlatTensor<kDepth>& tensor : tensors)
    for (int64_t offset = 0; offset < tensor.numel; offset += kBlockSize)
      blocks.push_back({&tensor, offset, std::min(kBlockSize, tensor.numel - offset)});
  return blocks;
}

// The findings of the threads of a checking kernel.
class SharedFindings {
 public:
  void report(int64_t tensor) {
    int64_t known = first_;
    while (tensor < known && !first_.compare_exchange_weak(known, tensor)) {
    }
  }

  void write(const Findings& findings) const {
    if (first_ == kNone) return;
    if (findings.found_inf != nullptr) *findings.found_inf = 1.0f;
    if (findings.first_bad != nullptr) *findings.first_bad = std::min<int64_t>(*findings.first_bad, first_);
  }

 private:
  static constexpr int64_t kNone = INT64_MAX;
  std::atomic<int64_t> first_{kNone};
};

// Calls body(index) for every block, from several threads at once if that is faster.
template <int kDepth, class Body>
void for_each_block(const std::vector<Block<kDepth>>& blocks, const Body& body) {
  const int64_t count = static_cast<int64_t>(blocks.size());
  int64_t elements = 0;
  for (const Block<kDepth>& block : blocks) elements += block.size;
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t, int64_t) {
    for (int64_t i = next++; i < count; i = next++) body(i);
  };
  if (elements <= std::max(kSerialSize, kSmallBlock * count))
    work(0, 1);
  else
    torch::stable::parallel_for(0, torch::stable::get_num_threads(), 1, work);
}

}  // namespace ampkit
