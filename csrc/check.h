// Readable errors: AMPKIT_CHECK(condition, pieces...) raises RuntimeError in Python with exactly the given pieces.
// STD_TORCH_CHECK would put the path of the source file in front.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

namespace ampkit {

// Thrown before anything was written: Python may compute the call in another way. Any other exception may come after a launch.
class Refusal : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Thrown before a kernel has written anything, if torch could not allocate. The stable ABI hides the type and the text of
// torch's error: Python allocates the same bytes, and torch raises its own (ampkit/kernels/reference.py).
class OutOfMemory : public std::runtime_error {
 public:
  explicit OutOfMemory(int64_t bytes) : std::runtime_error("ampkit: out of memory: " + std::to_string(bytes) + " bytes") {}
};

template <class Allocate>
auto allocated(int64_t bytes, const Allocate& allocate) {
  try {
    return allocate();
  } catch (const std::exception&) {
    throw OutOfMemory(bytes);
  }
}

template <class... Pieces>
[[noreturn]] void fail(const Pieces&... pieces) {
  std::ostringstream message;
  (message << ... << pieces);
  throw Refusal(message.str());
}

}  // namespace ampkit

#define AMPKIT_CHECK(condition, ...)                \
  do {                                              \
    if (!(condition)) ::ampkit::fail(__VA_ARGS__); \
  } while (0)
