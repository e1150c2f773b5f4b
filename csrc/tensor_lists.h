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
#include "functors/number.h"
#include "ops.h"

namespace ampkit {

enum class DType : uint8_t { kFloat, kHalf, kBFloat16 };
enum class Role { kRead, kWrite };

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

inline std::string describe_shape(const Tensor& tensor) {
  std::ostringstream text;
  text << "[";
  for (int64_t d = 0; d < tensor.dim(); ++d) text << (d == 0 ? "" : ", ") << tensor.size(d);
  text << "]";
  return text.str();
}

inline bool same_sizes(const Tensor& x, const Tensor& y) {
  const auto a = x.sizes(), b = y.sizes();
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin());
}

// Whether the elements fill their memory without gaps or overlap, in whatever order of dimensions.
inline bool is_dense(const Tensor& tensor) {
  if (tensor.is_contiguous()) return true;
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (int64_t d = 0; d < tensor.dim(); ++d)
    if (tensor.size(d) != 1) dims.emplace_back(tensor.stride(d), tensor.size(d));
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

inline bool same_strides(const Tensor& x, const Tensor& y) {
  const auto sizes = x.sizes(), a = x.strides(), b = y.strides();
  for (size_t d = 0; d < sizes.size(); ++d)
    if (sizes[d] != 1 && a[d] != b[d]) return false;
  return true;
}

template <int kDepth>
class TensorLists {
 public:
  TensorLists(const char* op, const std::array<NamedList, kDepth>& lists) : op_(op) {
    const size_t count = lists[0].tensors.size();
    for (const NamedList& list : lists)
      AMPKIT_CHECK(list.tensors.size() == count, op, ": ", lists[0].name, " has ", count, " tensors, ", list.name,
                   " has ", list.tensors.size(), "; pass lists of one length");
    if (count == 0) return;
    is_cpu_ = lists[0].tensors[0].is_cpu();
    device_index_ = lists[0].tensors[0].get_device_index();
    // All checks come before the first staging copy: an error leaves every tensor as it was.
    flat_.resize(count);
    for (size_t i = 0; i < count; ++i) {
      flat_[i].numel = lists[0].tensors[i].numel();
      for (int k = 0; k < kDepth; ++k) flat_[i].dtype[k] = check(lists[0], lists[k], i);
    }
    for (size_t i = 0; i < count; ++i) locate(lists, i);
  }

  const std::vector<FlatTensor<kDepth>>& flat() const { return flat_; }

  // Brings staged results home. Call it once the kernels are done (on CUDA: launched).
  void finish() {
    for (auto& [target, copy] : written_) torch::stable::copy_(target, copy);
  }

 private:
  DType dtype_of(const NamedList& list, size_t i) const {
    using torch::headeronly::ScalarType;
    const ScalarType type = list.tensors[i].scalar_type();
    switch (type) {
      case ScalarType::Float: return DType::kFloat;
      case ScalarType::Half: return DType::kHalf;
      case ScalarType::BFloat16: return DType::kBFloat16;
      default:
        fail(op_, ": ", list.name, "[", i, "] is ", torch::headeronly::toString(type),
             "; the kernels take Float, Half and BFloat16");
    }
  }

  DType check(const NamedList& first, const NamedList& list, size_t i) const {
    const Tensor& expected = first.tensors[i];
    const Tensor& found = list.tensors[i];
    AMPKIT_CHECK(&found == &expected || same_sizes(found, expected), op_, ": ", list.name, "[", i, "] has shape ",
                 describe_shape(found), ", ", first.name, "[", i, "] has shape ", describe_shape(expected), "; they must be equal");
    AMPKIT_CHECK(found.is_cpu() == is_cpu_ && found.get_device_index() == device_index_, op_, ": ", list.name, "[", i,
                 "] is on another device than ", first.name, "[0]; one call serves one device");
    return dtype_of(list, i);
  }

  void locate(const std::array<NamedList, kDepth>& lists, size_t i) {
    bool flat = true;
    for (int k = 0; k < kDepth && flat; ++k) flat = lists[k].tensors[i].is_contiguous();
    if (!flat) {
      flat = is_dense(lists[0].tensors[i]);
      for (int k = 1; k < kDepth && flat; ++k) flat = same_strides(lists[k].tensors[i], lists[0].tensors[i]);
    }
    for (int k = 0; k < kDepth; ++k) {
      const Tensor& tensor = lists[k].tensors[i];
      flat_[i].data[k] = flat ? tensor.mutable_data_ptr() : stage(tensor, lists[k].role);
    }
  }

  void* stage(const Tensor& tensor, Role role) {
    // Never the tensor itself: contiguous() may return its argument, and another list may hold the same memory.
    Tensor copy = torch::stable::new_empty(tensor, tensor.sizes());
    torch::stable::copy_(copy, tensor);
    (role == Role::kWrite ? written_ : read_).emplace_back(tensor, copy);
    return copy.mutable_data_ptr();
  }

  const char* op_;
  bool is_cpu_ = true;
  int32_t device_index_ = 0;
  std::vector<FlatTensor<kDepth>> flat_;
  std::vector<std::pair<Tensor, Tensor>> read_;  // kept alive until the kernels are done
  std::vector<std::pair<Tensor, Tensor>> written_;
};

// An optional tensor of one element that a kernel reads or writes, on the lists' device; nullptr where it is absent.
template <class T>
T* element_data(const char* op, const char* name, const MaybeTensor& tensor, const Tensor& beside) {
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
  return static_cast<T*>(tensor->mutable_data_ptr());
}

// Where a kernel reports values that are not finite: that there are any, and the first tensor that has one.
struct Findings {
  float* found_inf;
  int64_t* first_bad;

  Findings(const char* op, const MaybeTensor& found_inf, const MaybeTensor& first_bad, const Tensor& beside)
      : found_inf(element_data<float>(op, "found_inf", found_inf, beside)),
        first_bad(element_data<int64_t>(op, "first_bad", first_bad, beside)) {}
};

inline Number number(const char* op, const char* name, double value, const MaybeTensor& tensor, const Tensor& beside) {
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
  return static_cast<const float*>(vector->mutable_data_ptr());
}

}  // namespace ampkit
