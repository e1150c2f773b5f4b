// A number from the host, or one element of a tensor, which is read where the kernel runs: the host does not wait for it.
#pragma once

#include "functors/macros.h"

namespace ampkit {

struct Number {
  double value;
  const float* element;  // nullptr: take the value

  AMPKIT_INLINE double get() const { return element == nullptr ? value : static_cast<double>(*element); }
};

}  // namespace ampkit
