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

template <class MakeLists, class Kernel>
void run_over(const char* op, const MakeLists& make_lists, const TensorList& first, const TensorList& second, const TensorList& third,
         const Kernel& kernel) {
  if (first.empty()) return;
  const int32_t device = device_of(op, first.front());
  const torch::stable::accelerator::DeviceGuard guard(device);
  TensorLists<3> lists = make_lists(op, first, second, third);
  multi_tensor_apply(lists.flat(), kernel, current_stream(device));
}

}  // namespace

void multi_tensor_join_cuda(const TensorList& weights, const TensorList& rests, const TensorList& outputs) {
  run_over("multi_tensor_join", join_lists, weights, rests, outputs, JoinKernel());
}

void multi_tensor_split_cuda(const TensorList& values, const TensorList& weights, const TensorList& rests) {
  run_over("multi_tensor_split", split_lists, values, weights, rests, SplitKernel());
}

}  // namespace ampkit
