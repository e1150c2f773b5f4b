// multi_tensor_join and multi_tensor_split on CUDA: Note [weights and rests]. Memory traffic: 8 bytes an element, 4 each way.
#include "cuda/multi_tensor_apply.cuh"
#include "ops.h"

namespace ampkit {
namespace {

struct JoinKernel {
  __device__ void operator()(const Chunk<3>& chunk) const {
    for (int i = threadIdx.x * kWidth; i < chunk.size; i += kStride) {
      float values[kWidth];
      chunk.join_rests(0, chunk.fetch(0, i), chunk.fetch(1, i), values);
      chunk.store(2, i, values);
    }
  }
};

struct SplitKernel {
  __device__ void operator()(const Chunk<3>& chunk) const {
    for (int i = threadIdx.x * kWidth; i < chunk.size; i += kStride) {
      float values[kWidth];
      chunk.load(0, i, values);
      chunk.store_split(1, 2, i, values);
    }
  }
};

template <class Kernel>
void run_over(const char* op, const TensorLists<3>& lists, const TensorList& first, const Kernel& kernel) {
  if (first.empty()) return;
  const OnDevice device = on_device_of(op, first[0]);
  multi_tensor_apply(lists.flat(), kernel, device.stream);
}

}  // namespace

void multi_tensor_join_cuda(const TensorList& weights, const TensorList& rests, const TensorList& outputs) {
  constexpr const char* op = "multi_tensor_join";
  run_over(op, join_lists(op, weights, rests, outputs), weights, JoinKernel());
}

void multi_tensor_split_cuda(const TensorList& values, const TensorList& weights, const TensorList& rests) {
  constexpr const char* op = "multi_tensor_split";
  run_over(op, split_lists(op, values, weights, rests), values, SplitKernel());
}

}  // namespace ampkit
