// TensorList: the tensors of an operator's list argument, and TensorView, one of them.
//
// A std::vector<torch::stable::Tensor> would allocate a shared owner for every tensor, and query it twice instead of once:
// on thousands of small tensors that is more work than the arithmetic. These classes own and read the bare handles.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace ampkit {

using torch::stable::Tensor;

// A tensor that its caller owns.
class TensorView {
 public:
  explicit TensorView(AtenTensorHandle handle) : handle_(handle) {}
  TensorView(const Tensor& tensor) : handle_(tensor.get()) {}

  torch::headeronly::IntHeaderOnlyArrayRef sizes() const { return {get<int64_t*>(aoti_torch_get_sizes), dim()}; }
  torch::headeronly::IntHeaderOnlyArrayRef strides() const { return {get<int64_t*>(aoti_torch_get_strides), dim()}; }
  bool is_contiguous() const { return get<bool>(aoti_torch_is_contiguous); }
  void* mutable_data_ptr() const { return get<void*>(torch_get_mutable_data_ptr); }
  int64_t storage_bytes() const { return get<int64_t>(aoti_torch_get_storage_size); }
  int32_t get_device_index() const { return get<int32_t>(aoti_torch_get_device_index); }
  int32_t device_type() const { return get<int32_t>(aoti_torch_get_device_type); }
  bool is_cpu() const {
    static const int32_t cpu = aoti_torch_device_type_cpu();
    return device_type() == cpu;
  }
  // The number that an aoti_torch_dtype_*() function returns.
  int32_t dtype_code() const { return get<int32_t>(aoti_torch_get_dtype); }

  Tensor share() const {
    AtenTensorHandle shared = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(handle_, &shared));
    return Tensor(shared);
  }

 private:
  template <class Value>
  Value get(AOTITorchError (*getter)(AtenTensorHandle, Value*)) const {
    Value value{};
    TORCH_ERROR_CODE_CHECK(getter(handle_, &value));
    return value;
  }

  size_t dim() const { return static_cast<size_t>(get<int64_t>(aoti_torch_get_dim)); }

  AtenTensorHandle handle_;
};

class TensorList {
 public:
  // Takes the tensors over from the list that the dispatcher passes to an operator, and frees that list.
  explicit TensorList(StableListHandle list) {
    size_t size = 0;
    TORCH_ERROR_CODE_CHECK(torch_list_size(list, &size));
    handles_.reserve(size);
    for (size_t i = 0; i < size; ++i) {
      StableIValue element = 0;
      TORCH_ERROR_CODE_CHECK(torch_list_get_item(list, i, &element));
      handles_.push_back(torch::stable::detail::to<AtenTensorHandle>(element));
    }
    TORCH_ERROR_CODE_CHECK(torch_delete_list(list));
  }
  TensorList() = default;
  // Tensors that the caller holds as long as this list is used.
  static TensorList borrowed(std::vector<AtenTensorHandle> handles) {
    TensorList list;
    list.handles_ = std::move(handles);
    list.owns_ = false;
    return list;
  }
  TensorList(TensorList&& other) noexcept : handles_(std::exchange(other.handles_, {})), owns_(other.owns_) {}
  TensorList& operator=(TensorList&& other) noexcept {
    std::swap(handles_, other.handles_);
    std::swap(owns_, other.owns_);
    return *this;
  }
  ~TensorList() {
    if (owns_)
      for (AtenTensorHandle handle : handles_) aoti_torch_delete_tensor_object(handle);
  }

  size_t size() const { return handles_.size(); }
  bool empty() const { return handles_.empty(); }
  TensorView operator[](size_t i) const { return TensorView(handles_[i]); }
  TensorView front() const { return TensorView(handles_.front()); }

 private:
  std::vector<AtenTensorHandle> handles_;
  bool owns_ = true;
};

}  // namespace ampkit

// With this TORCH_BOX makes a TensorList of an argument of type Tensor[].
template <>
struct torch::stable::detail::ToImpl<ampkit::TensorList> {
  static ampkit::TensorList call(StableIValue value, uint64_t, bool) {
    return ampkit::TensorList(to<StableListHandle>(value));
  }
};
