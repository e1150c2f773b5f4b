// Launches handed over to Python, and what memory they may access.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#undef TORCH_TARGET_VERSION  // torch's allocators are no part of its stable ABI
#include <c10/core/Allocator.h>

#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "module.h"
#include "threads.h"

namespace emulation {

PyObject *begin = nullptr, *end = nullptr;

namespace {

constexpr uint64_t kUnwritten = 0xD1B54A32D192ED03;

// Torch's own, whose memory is listed, and holds kUnwritten where nobody has written.
class Watched final : public c10::Allocator {
 public:
  explicit Watched(c10::Allocator* own) : own_(own) {}

  c10::DataPtr allocate(size_t size) override {
    void* memory = own_->raw_allocate(size);
    char* bytes = static_cast<char*>(memory);
    for (size_t i = 0; i < size; i += sizeof(kUnwritten)) std::memcpy(bytes + i, &kUnwritten, std::min(sizeof(kUnwritten), size - i));
    const std::lock_guard<std::mutex> lock(mutex_);
    if (size > 0) sizes_[reinterpret_cast<size_t>(memory)] = size;
    return {memory, memory, &Watched::release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Watched::release; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }

  std::pair<size_t, size_t> find(size_t address) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto beyond = sizes_.upper_bound(address);
    if (beyond == sizes_.begin()) return {0, 0};
    const auto [base, size] = *--beyond;
    return address < base + size ? std::pair(base, size) : std::pair(size_t{0}, size_t{0});
  }

  static Watched* instance;

 private:
  static void release(void* memory) {
    {
      const std::lock_guard<std::mutex> lock(instance->mutex_);
      instance->sizes_.erase(reinterpret_cast<size_t>(memory));
    }
    if (memory != nullptr) instance->own_->raw_deallocate(memory);
  }

  c10::Allocator* own_;
  std::mutex mutex_;
  std::map<size_t, size_t> sizes_;
};

Watched* Watched::instance = nullptr;

// Calls a function of Python, and throws what it raises.
void call(PyObject* function, PyObject* arguments) {
  PyObject* result = arguments == nullptr ? nullptr : PyObject_CallObject(function, arguments);
  Py_XDECREF(arguments);
  if (result != nullptr) return Py_DECREF(result);
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyObject* text = value == nullptr ? nullptr : PyObject_Str(value);
  PyObject* bytes = text == nullptr ? nullptr : PyUnicode_AsUTF8String(text);
  const std::string said = bytes == nullptr ? "a launch that was handed over failed" : PyBytes_AsString(bytes);
  for (PyObject* one : {type, value, trace, text, bytes}) Py_XDECREF(one);
  throw std::runtime_error(said);
}

class Locked {  // Python's lock
 public:
  Locked() : state_(PyGILState_Ensure()) {}
  ~Locked() { PyGILState_Release(state_); }

 private:
  PyGILState_STATE state_;
};

}  // namespace

void watch_memory() {
  if (Watched::instance != nullptr) return;
  Watched::instance = new Watched(c10::GetAllocator(c10::DeviceType::CPU));
  c10::SetAllocator(c10::DeviceType::CPU, Watched::instance, 255);
}

std::pair<size_t, size_t> allocation_of(size_t address) { return Watched::instance->find(address); }

bool hands_over() { return begin != nullptr; }

void begin_handover(const char* entry, const std::vector<char>& parameters, int64_t blocks, int64_t threads, size_t shared) {
  const Locked locked;
  call(begin, Py_BuildValue("(sy#LLn)", entry, parameters.data(), static_cast<Py_ssize_t>(parameters.size()),
                            static_cast<long long>(blocks), static_cast<long long>(threads), static_cast<Py_ssize_t>(shared)));
}

void end_handover() {
  const Locked locked;
  try {
    call(end, PyTuple_New(0));
  } catch (...) {
    check_launch();  // an error is one of this launch, which nothing else looks at any more
    throw;
  }
}

}  // namespace emulation
