// Errors that speak: AMPKIT_CHECK(condition, pieces...) raises RuntimeError in Python with exactly the pieces given,
// where STD_TORCH_CHECK would put the path of the source file in front.
#pragma once

#include <sstream>
#include <stdexcept>

namespace ampkit {

template <class... Pieces>
[[noreturn]] void fail(const Pieces&... pieces) {
  std::ostringstream message;
  (message << ... << pieces);
  throw std::runtime_error(message.str());
}

}  // namespace ampkit

#define AMPKIT_CHECK(condition, ...)                \
  do {                                              \
    if (!(condition)) ::ampkit::fail(__VA_ARGS__); \
  } while (0)
