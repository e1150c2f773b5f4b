// Errors that speak: AMPKIT_CHECK(condition, pieces...) raises RuntimeError in Python with exactly the pieces given,
// where STD_TORCH_CHECK would put the path of the source file in front.
#pragma once

#include <sstream>
#include <stdexcept>

namespace ampkit {

// Thrown before anything was written: whoever called may have somebody else compute. Any other exception may come after a launch.
class Refusal : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

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
