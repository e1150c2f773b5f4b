// multi_tensor_axpby on the CPU. Memory traffic: both inputs read once, each output written once.
#ifdef AMPKIT_CAPABILITY

namespace ampkit {
namespace AMPKIT_CAPABILITY {

template <class X>
static int32_t axpby_tile(const X* x, const float* y, float* out, int64_t n, AxpbyFunctor functor, int32_t x_mask, int32_t y_mask) {
  int32_t highest = 0;
#pragma GCC ivdep  // out may be x or y itself, element for element
  for (int64_t i = 0; i < n; ++i) {
    const float value = widen(x[i]);
    const int32_t of_x = magnitude_bits(value) & x_mask, of_y = magnitude_bits(y[i]) & y_mask;
    const int32_t magnitude = of_x > of_y ? of_x : of_y;
    highest = magnitude > highest ? magnitude : highest;
    out[i] = functor(value, y[i]);
  }
  return highest;
}

// Returns whether the checked inputs of the block are finite.
static bool axpby_block(const Block<3>& block, AxpbyFunctor functor, bool check_x, bool check_y) {
  const FlatTensor<3>& tensor = *block.tensor;
  TileBuffer x_buffer, y_buffer, out_buffer;
  const int32_t x_mask = check_x ? -1 : 0, y_mask = check_y ? -1 : 0;
  int32_t highest = 0;
  for (int64_t start = 0; start < block.size; start += kTile) {
    const int64_t offset = block.offset + start;
    const int64_t n = block.size - start < kTile ? block.size - start : kTile;
    const float* y = load(tensor.data[1], tensor.dtype[1], offset, n, y_buffer);
    float* out = target(tensor.data[2], tensor.dtype[2], offset, out_buffer);
    const int32_t magnitude = visit_tile(tensor.data[0], tensor.dtype[0], offset, n, x_buffer, [&](const auto* x) {
      return axpby_tile(x, y, out, n, functor, x_mask, y_mask);
    });
    highest = magnitude > highest ? magnitude : highest;
    store(out, tensor.data[2], tensor.dtype[2], offset, n);
  }
  return highest < kInfinityBits;
}

}  // namespace AMPKIT_CAPABILITY
}  // namespace ampkit

#else

#include "cpu/multi_tensor_apply.h"
#include "functors/multi_tensor_axpby.h"
#include "ops.h"

#define AMPKIT_SOURCE "cpu/multi_tensor_axpby.cpp"
#include "cpu/each_capability.h"

namespace ampkit {

void multi_tensor_axpby_cpu(const TensorList& xs, const TensorList& ys, const TensorList& outputs, double a,
                            const MaybeTensor& a_tensor, double b, const MaybeTensor& b_tensor, int64_t arg_to_check,
                            const MaybeTensor& found_inf, const MaybeTensor& first_bad) {
  constexpr const char* op = "multi_tensor_axpby";
  AMPKIT_CHECK(arg_to_check >= -1 && arg_to_check <= 1, op, ": arg_to_check is ", arg_to_check,
               "; expected -1 (both), 0 (xs) or 1 (ys)");
  TensorLists<3> lists(op, {{{xs, Role::kRead}, {ys, Role::kRead}, {outputs, Role::kWrite}}});
  if (xs.empty()) return;
  const Findings findings(op, found_inf, first_bad, xs[0]);
  const AxpbyFunctor functor(number(op, a, a_tensor, xs[0]), number(op, b, b_tensor, xs[0]));
  const auto blocks = blocks_of(lists.flat());
  const auto axpby_block = AMPKIT_VARIANT(axpby_block);
  SharedFindings found;
  for_each_block(blocks, [&](int64_t i) {
    if (!axpby_block(blocks[i], functor, arg_to_check != 1, arg_to_check != 0))
      found.report(blocks[i].tensor - lists.flat().data());
  });
  found.write(findings);
}

}  // namespace ampkit

#endif
