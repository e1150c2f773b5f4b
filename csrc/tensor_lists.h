// TensorLists: what a multi-tensor operator was given, checked and brought into a form that a driver can run over.
//
// A driver sees flat memory: for tensor i, one pointer and one dtype per list, and a number of elements. Lists may mix
// dtypes and sizes freely. Tensors without gaps whose strides agree over all lists (contiguous, channels-last) are used
// in place; others are staged through a contiguous copy and written back by finish().
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
#include "functors/moments.h"
#include "functors/number.h"
#include "ops.h"

namespace ampkit {

enum class DType : uint8_t { kFloat, kHalf, kBFloat16, kInt16, kPacked };  // the last: functors/moments.h
// kRest: rests (Note [weights and rests]), read. kWriteOrRest: written, and may hold rests. kMoment: written, and may be packed.
enum class Role { kRead, kRest, kWrite, kWriteOrRest, kMoment };

AMPKIT_INLINE constexpr bool is_rest(DType dtype) { return dtype == DType::kInt16; }

struct NamedList {
  const char* name;
  const TensorList& tensors;
  Role role;
};

template <int kDepth>
struct FlatTensor {
  void* data[kDepth];
  DType dtype[kDepth];
  int64_t numel;
};

using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

inline std::string describe(Sizes sizes) {
  std::ostringstream text;
  const char* comma = "";
  text << "[";
  for (int64_t size : sizes) text << std::exchange(comma, ", ") << size;
  text << "]";
  return text.str();
}

inline std::string describe_shape(TensorView tensor) { return describe(tensor.sizes()); }

inline bool are_equal(Sizes a, Sizes b) { return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin()); }

// Whether the elements fill their memory without gaps or overlap, in whatever order of dimensions.
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

// Whether several elements lie in one place for certain, as torch asks before it writes.
inline bool overlaps_itself(TensorView tensor) {
  const Sizes sizes = tensor.sizes(), strides = tensor.strides();
  for (size_t d = 0; d < sizes.size(); ++d)
    if (sizes[d] > 1 && strides[d] == 0) return true;
  return false;
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
  TensorLists(const char* op, const std::array<NamedList, kDepth>& lists) : op_(op), lists_(lists) {
    const size_t count = lists[0].tensors.size();
    for (const NamedList& list : lists)
      AMPKIT_CHECK(list.tensors.size() == count, op, ": ", lists[0].name, " has ", count, " tensors, ", list.name,
                   " has ", list.tensors.size(), "; pass lists of one length");
    if (count == 0) return;
    is_cpu_ = lists[0].tensors[0].is_cpu();
    device_index_ = lists[0].tensors[0].get_device_index();
    flat_.reserve(count);
    // All checks come before the first staging copy: an error leaves every tensor as it was.
    std::vector<size_t> staged;
    for (size_t i = 0; i < count; ++i)
      if (!flatten(i)) staged.push_back(i);
    for (size_t i : staged)
      for (int k = 0; k < kDepth; ++k)
        if (flat_[i].dtype[k] != DType::kPacked) flat_[i].data[k] = stage(lists[k].tensors[i].share(), lists[k].role);
  }

  const std::vector<FlatTensor<kDepth>>& flat() const { return flat_; }
  bool has_packed() const { return has_packed_; }  // of any tensor

  // Brings staged results home. Call it once the kernels are done (on CUDA: launched).
  void finish() {
    for (auto& [target, copy] : written_) torch::stable::copy_(target, copy);
  }

 private:
  // Reads each tensor's record once, for it is seldom in the cache. Returns whether the row can be used in place.
  bool flatten(size_t i) {
    FlatTensor<kDepth>& flat = flat_.emplace_back();
    const Sizes expected = lists_[0].tensors[i].sizes();
    flat.numel = 1;
    for (int64_t size : expected) flat.numel *= size;
    bool contiguous = true;
    for (int k = 0; k < kDepth; ++k) {
      const TensorView tensor = lists_[k].tensors[i];
      flat.dtype[k] = dtype_of(k, i);
      if (flat.dtype[k] == DType::kPacked) {
        check_packed(k, i, flat.numel);
        has_packed_ = true;
      } else {
        AMPKIT_CHECK(k == 0 || are_equal(tensor.sizes(), expected), op_, ": ", lists_[k].name, "[", i, "] has shape ",
                     describe_shape(tensor), ", ", lists_[0].name, "[", i, "] has shape ",
                     describe_shape(lists_[0].tensors[i]), "; they must be equal");
      }
      AMPKIT_CHECK(tensor.is_cpu() == is_cpu_ && (is_cpu_ || tensor.get_device_index() == device_index_), op_, ": ", lists_[k].name, "[",
                   i, "] is on another device than ", lists_[0].name, "[0]; one call serves one device");
      AMPKIT_CHECK(flat.numel == 0 || tensor.storage_bytes() > 0, op_, ": ", lists_[k].name, "[", i, "] of shape ",
                   describe_shape(tensor), " has no memory: its storage was freed, as FSDP does with what it has gathered");
      flat.data[k] = tensor.mutable_data_ptr();
      contiguous = contiguous && tensor.is_contiguous();
    }
    if (contiguous || share_layout(i)) return true;
    for (const NamedList& list : lists_)
      AMPKIT_CHECK(list.role <= Role::kRest || flat.numel == 0 || !overlaps_itself(list.tensors[i]), op_, ": several elements of ",
                   list.name, "[", i, "] lie in one place in memory (shape ", describe(list.tensors[i].sizes()), ", strides ",
                   describe(list.tensors[i].strides()), "); pass a copy of it");
    return false;
  }

  DType dtype_of(int k, size_t i) const {
    static const int32_t float_code = aoti_torch_dtype_float32(), half_code = aoti_torch_dtype_float16(),
                         bfloat16_code = aoti_torch_dtype_bfloat16();
    const TensorView tensor = lists_[k].tensors[i];
    const int32_t code = tensor.dtype_code();
    if (code == float_code) return DType::kFloat;
    if (code == half_code) return DType::kHalf;
    if (code == bfloat16_code) return DType::kBFloat16;
    if (code == aoti_torch_dtype_int16() && (lists_[k].role == Role::kRest || lists_[k].role == Role::kWriteOrRest)) return DType::kInt16;
    if (code == aoti_torch_dtype_uint8() && lists_[k].role == Role::kMoment) return DType::kPacked;
    fail(op_, ": ", lists_[k].name, "[", i, "] is ", torch::headeronly::toString(tensor.share().scalar_type()),
         "; the kernels take Float, Half and BFloat16");
  }

  // Packed moments are in the order of a contiguous tensor, in bytes that are one.
  void check_packed(int k, size_t i, int64_t numel) const {
    const TensorView tensor = lists_[k].tensors[i];
    const int64_t expected = packed_bytes(numel);
    AMPKIT_CHECK(are_equal(tensor.sizes(), {&expected, 1}) && tensor.is_contiguous() &&
                     reinterpret_cast<uintptr_t>(tensor.mutable_data_ptr()) % 4 == 0,
                 op_, ": ", lists_[k].name, "[", i, "] has shape ", describe_shape(tensor), "; packed moments of ", numel,
                 " elements are a contiguous tensor of shape [", expected, "] that begins at a multiple of four bytes");
  }

  bool share_layout(size_t i) const {
    for (DType dtype : flat_[i].dtype)
      if (dtype == DType::kPacked) return false;
    const TensorView first = lists_[0].tensors[i];
    bool shared = is_dense(first);
    for (int k = 1; k < kDepth && shared; ++k) shared = same_strides(lists_[k].tensors[i], first);
    return shared;
  }

  void* stage(const Tensor& tensor, Role role) {
    // Never the tensor itself: contiguous() may return its argument, and another list may hold the same memory.
    Tensor copy = torch::stable::new_empty(tensor, tensor.sizes());
    torch::stable::copy_(copy, tensor);
    (role <= Role::kRest ? read_ : written_).emplace_back(tensor, copy);
    return copy.mutable_data_ptr();
  }

  const char* op_;
  const std::array<NamedList, kDepth> lists_;
  bool is_cpu_ = true;
  int32_t device_index_ = 0;
  bool has_packed_ = false;
  std::vector<FlatTensor<kDepth>> flat_;
  std::vector<std::pair<Tensor, Tensor>> read_;  // kept alive until the kernels are done
  std::vector<std::pair<Tensor, Tensor>> written_;
};

// Raises unless list k of these has weights in lower precision, and rests beside them in the next one.
inline TensorLists<3> checked_rests(const char* op, TensorLists<3> lists, int k) {
  for (const FlatTensor<3>& tensor : lists.flat()) {
    const bool fits = tensor.dtype[k] == DType::kHalf || tensor.dtype[k] == DType::kBFloat16;
    AMPKIT_CHECK(fits && is_rest(tensor.dtype[k + 1]), op,
                 ": expected weights in Half or BFloat16, rests in Short and values in a floating point dtype");
  }
  return lists;
}

inline TensorLists<3> join_lists(const char* op, const TensorList& weights, const TensorList& rests, const TensorList& outputs) {
  return checked_rests(
      op, {op, {{{"weights", weights, Role::kRead}, {"rests", rests, Role::kRest}, {"outputs", outputs, Role::kWrite}}}}, 0);
}

inline TensorLists<3> split_lists(const char* op, const TensorList& values, const TensorList& weights, const TensorList& rests) {
  return checked_rests(
      op, {op, {{{"values", values, Role::kRead}, {"weights", weights, Role::kWrite}, {"rests", rests, Role::kWriteOrRest}}}}, 1);
}

inline void check_memory(const char* op, const char* name, TensorView tensor) {
  AMPKIT_CHECK(tensor.storage_bytes() != 0, op, ": ", name, " has no memory: its storage was freed");
}

// An optional tensor of one element that a kernel reads or writes, on the lists' device; nullptr where it is absent.
template <class T>
T* element_data(const char* op, const char* name, const MaybeTensor& tensor, TensorView beside) {
  using torch::headeronly::ScalarType;
  constexpr ScalarType kType = std::is_same_v<T, float>     ? ScalarType::Float
                               : std::is_same_v<T, int32_t> ? ScalarType::Int
                                                            : ScalarType::Long;
  if (!tensor.has_value()) return nullptr;
  AMPKIT_CHECK(tensor->scalar_type() == kType && tensor->numel() == 1, op, ": ", name, " is ",
               torch::headeronly::toString(tensor->scalar_type()), " of shape ", describe_shape(*tensor), "; pass a tensor of ",
               torch::headeronly::toString(kType), " and shape [1]");
  AMPKIT_CHECK(tensor->is_cpu() == beside.is_cpu() && tensor->get_device_index() == beside.get_device_index(), op, ": ",
               name, " is on another device than the tensors");
  check_memory(op, name, *tensor);
  return static_cast<T*>(tensor->mutable_data_ptr());
}

// Where a kernel reports values that are not finite: that there are any, and the first tensor that has one.
struct Findings {
  float* found_inf;
  int64_t* first_bad;

  Findings(const char* op, const MaybeTensor& found_inf, const MaybeTensor& first_bad, TensorView beside)
      : found_inf(element_data<float>(op, "found_inf", found_inf, beside)),
        first_bad(element_data<int64_t>(op, "first_bad", first_bad, beside)) {}
};

inline Number number(const char* op, const char* name, double value, const MaybeTensor& tensor, TensorView beside) {
  return {value, element_data<float>(op, name, tensor, beside)};
}

// A factor for each tensor, float32; nullptr where it is absent.
inline const float* vector_data(const char* op, const char* name, const MaybeTensor& vector, const TensorList& tensors) {
  if (!vector.has_value()) return nullptr;
  AMPKIT_CHECK(vector->scalar_type() == torch::headeronly::ScalarType::Float && vector->is_contiguous() &&
                   vector->numel() == static_cast<int64_t>(tensors.size()),
               op, ": ", name, " is ", torch::headeronly::toString(vector->scalar_type()), " of shape ",
               describe_shape(*vector), "; pass a contiguous float32 tensor of shape [", tensors.size(), "]");
  AMPKIT_CHECK(vector->is_cpu() == tensors[0].is_cpu() && vector->get_device_index() == tensors[0].get_device_index(), op,
               ": ", name, " is on another device than the tensors");
  check_memory(op, name, *vector);
  return static_cast<const float*>(vector->mutable_data_ptr());
}

}  // namespace ampkit
