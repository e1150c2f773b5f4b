// TensorLists: the arguments of a multi-tensor operator, checked and in the form that a driver runs over.
//
// A driver sees flat memory: for tensor i, one pointer and one dtype per list, and a number of elements. Lists may mix
// dtypes and sizes freely. The tensors of one row have no gaps, and strides that agree (contiguous, channels-last); others are
// refused, and Python copies them (ampkit/kernels/reference.py).
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "check.h"
#include "moments/format.h"
#include "functors/number.h"
#include "ops.h"

namespace ampkit {

enum class DType : uint8_t { kFloat, kHalf, kBFloat16, kInt16, kPacked };  // the last: moments/format.h
// kRest: rests (Note [weights and rests]), read. kWriteOrRest: written, and may hold rests. kMoment: written, and may be packed.
enum class Role { kRead, kRest, kWrite, kWriteOrRest, kMoment };

AMPKIT_INLINE constexpr bool is_rest(DType dtype) { return dtype == DType::kInt16; }

// The tensors of one list of an operator: count of them from the first on.
struct Column {
  const TensorList* tensors;
  Role role;
  size_t first, count;

  Column() = default;
  Column(const TensorList& list, Role role) : Column(&list, role, 0, list.size()) {}
  Column(const TensorList* tensors, Role role, size_t first, size_t count)
      : tensors(tensors), role(role), first(first), count(count) {}
  TensorView operator[](size_t i) const { return (*tensors)[first + i]; }
};

template <int kDepth>
struct FlatTensor {
  void* data[kDepth];
  DType dtype[kDepth];
  int64_t numel;
};

using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

inline bool are_equal(Sizes a, Sizes b) { return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin()); }

// Whether the elements fill their memory without gaps or overlap, in any order of dimensions.
inline bool is_dense(TensorView tensor) {
  if (tensor.is_contiguous()) return true;
  const Sizes sizes = tensor.sizes(), strides = tensor.strides();
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (size_t d = 0; d < sizes.size(); ++d)
    if (sizes[d] != 1) dims.emplace_back(strides[d], sizes[d]);
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

inline bool same_strides(TensorView x, TensorView y) {
  const Sizes sizes = x.sizes(), a = x.strides(), b = y.strides();
  for (size_t d = 0; d < sizes.size(); ++d)
    if (sizes[d] != 1 && a[d] != b[d]) return false;
  return true;
}

template <int kDepth>
class TensorLists {
 public:
  TensorLists(const char* op, const std::array<Column, kDepth>& columns) : op_(op), columns_(columns) {
    const size_t count = columns[0].count;
    for (const Column& column : columns)
      AMPKIT_CHECK(column.count == count, op, ": lists of ", count, " and ", column.count, " tensors");
    if (count == 0) return;
    is_cpu_ = columns[0][0].is_cpu();
    device_index_ = columns[0][0].get_device_index();
    flat_.reserve(count);
    for (size_t i = 0; i < count; ++i) flatten(i);
  }

  const std::vector<FlatTensor<kDepth>>& flat() const { return flat_; }
  bool has_packed() const { return has_packed_; }  // of any tensor

 private:
  std::string at(int k, size_t i) const {
    return std::string(op_) + ": tensor " + std::to_string(i) + " of list " + std::to_string(k) + " ";
  }

  // Reads each tensor's record once, because it is seldom in the cache.
  void flatten(size_t i) {
    FlatTensor<kDepth>& flat = flat_.emplace_back();
    const Sizes expected = columns_[0][i].sizes();
    flat.numel = 1;
    for (int64_t size : expected) flat.numel *= size;
    bool contiguous = true;
    for (int k = 0; k < kDepth; ++k) {
      const TensorView tensor = columns_[k][i];
      flat.dtype[k] = dtype_of(k, i);
      if (flat.dtype[k] == DType::kPacked) {
        check_packed(k, i, flat.numel);
        has_packed_ = true;
      } else {
        AMPKIT_CHECK(k == 0 || are_equal(tensor.sizes(), expected), at(k, i), "has another shape than in list 0");
      }
      AMPKIT_CHECK(tensor.is_cpu() == is_cpu_ && (is_cpu_ || tensor.get_device_index() == device_index_), at(k, i),
                   "is on another device");
      AMPKIT_CHECK(flat.numel == 0 || tensor.storage_bytes() > 0, at(k, i), "has no memory");
      flat.data[k] = tensor.mutable_data_ptr();
      contiguous = contiguous && tensor.is_contiguous();
    }
    AMPKIT_CHECK(contiguous || share_layout(i), at(0, i), "and those beside it have gaps or different strides");
  }

  DType dtype_of(int k, size_t i) const {
    static const int32_t float_code = aoti_torch_dtype_float32(), half_code = aoti_torch_dtype_float16(),
                         bfloat16_code = aoti_torch_dtype_bfloat16();
    const TensorView tensor = columns_[k][i];
    const int32_t code = tensor.dtype_code();
    if (code == float_code) return DType::kFloat;
    if (code == half_code) return DType::kHalf;
    if (code == bfloat16_code) return DType::kBFloat16;
    const Role role = columns_[k].role;
    if (code == aoti_torch_dtype_int16() && (role == Role::kRest || role == Role::kWriteOrRest)) return DType::kInt16;
    if (code == aoti_torch_dtype_uint8() && role == Role::kMoment) return DType::kPacked;
    fail(at(k, i), "is neither float32, float16 nor bfloat16");
  }

  // Packed moments are bytes, in the order of a contiguous tensor.
  void check_packed(int k, size_t i, int64_t numel) const {
    const TensorView tensor = columns_[k][i];
    const int64_t expected = packed_bytes(numel);
    AMPKIT_CHECK(are_equal(tensor.sizes(), {&expected, 1}) && tensor.is_contiguous() &&
                     reinterpret_cast<uintptr_t>(tensor.mutable_data_ptr()) % 4 == 0,
                 at(k, i), "holds no packed moments of as many elements");
  }

  bool share_layout(size_t i) const {
    for (DType dtype : flat_[i].dtype)
      if (dtype == DType::kPacked) return false;
    const TensorView first = columns_[0][i];
    bool shared = is_dense(first);
    for (int k = 1; k < kDepth && shared; ++k) shared = same_strides(columns_[k][i], first);
    return shared;
  }

  const char* op_;
  const std::array<Column, kDepth> columns_;
  bool is_cpu_ = true;
  int32_t device_index_ = 0;
  bool has_packed_ = false;
  std::vector<FlatTensor<kDepth>> flat_;
};

// Raises unless list k of these has weights in lower precision, and rests beside them in the next one.
inline TensorLists<3> checked_rests(const char* op, TensorLists<3> lists, int k) {
  for (const FlatTensor<3>& tensor : lists.flat()) {
    const bool fits = tensor.dtype[k] == DType::kHalf || tensor.dtype[k] == DType::kBFloat16;
    AMPKIT_CHECK(fits && is_rest(tensor.dtype[k + 1]), op, ": weights are Half or BFloat16, and rests Short");
  }
  return lists;
}

inline TensorLists<3> join_lists(const char* op, const TensorList& weights, const TensorList& rests,
                                 const TensorList& outputs) {
  return checked_rests(
      op, {op, {{{weights, Role::kRead}, {rests, Role::kRest}, {outputs, Role::kWrite}}}}, 0);
}

inline TensorLists<3> split_lists(const char* op, const TensorList& values, const TensorList& weights,
                                  const TensorList& rests) {
  return checked_rests(
      op, {op, {{{values, Role::kRead}, {weights, Role::kWrite}, {rests, Role::kWriteOrRest}}}}, 1);
}

inline void check_memory(const char* op, TensorView tensor) {
  AMPKIT_CHECK(tensor.storage_bytes() != 0, op, ": an argument has no memory: its storage was freed");
}

// An optional tensor that a kernel reads or writes beside the lists: dense, of this many elements; nullptr if it is absent.
template <class T>
T* data_beside(const char* op, const MaybeTensor& tensor, TensorView beside, int64_t numel) {
  using torch::headeronly::ScalarType;
  constexpr ScalarType kType = std::is_same_v<T, float> ? ScalarType::Float : ScalarType::Long;
  if (!tensor.has_value()) return nullptr;
  AMPKIT_CHECK(tensor->scalar_type() == kType && tensor->numel() == numel && tensor->is_contiguous(), op, ": expected ", numel,
               " elements of ", torch::headeronly::toString(kType), " in an argument, found ", tensor->numel(), " of ",
               torch::headeronly::toString(tensor->scalar_type()));
  AMPKIT_CHECK(tensor->is_cpu() == beside.is_cpu() && tensor->get_device_index() == beside.get_device_index(), op,
               ": an argument is on another device than the lists");
  check_memory(op, *tensor);
  return static_cast<T*>(tensor->mutable_data_ptr());
}

template <class T>
T* element_data(const char* op, const MaybeTensor& tensor, TensorView beside) {
  return data_beside<T>(op, tensor, beside, 1);
}

// The report of a kernel on values that are not finite: whether there are any, and the first tensor that has one.
struct Findings {
  float* found_inf;
  int64_t* first_bad;

  Findings(const char* op, const MaybeTensor& found_inf, const MaybeTensor& first_bad, TensorView beside)
      : found_inf(element_data<float>(op, found_inf, beside)),
        first_bad(element_data<int64_t>(op, first_bad, beside)) {}
};

inline Number number(const char* op, double value, const MaybeTensor& tensor, TensorView beside) {
  return {value, element_data<float>(op, tensor, beside)};
}

// A number for each tensor of a list, float32; nullptr if it is absent.
inline const float* vector_data(const char* op, const MaybeTensor& vector, const TensorList& tensors) {
  return data_beside<float>(op, vector, tensors[0], static_cast<int64_t>(tensors.size()));
}

}  // namespace ampkit
