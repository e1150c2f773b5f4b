#include "cpu/capability.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include "check.h"
#include "ops.h"

namespace ampkit {
namespace {

constexpr const char* kNames[] = {"baseline", "avx2", "avx512"};

Capability of_this_processor() {
#if AMPKIT_X86_VARIANTS
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx2 && avx512) return Capability::kAvx512;
  if (avx2) return Capability::kAvx2;
#endif
  return Capability::kBaseline;
}

Capability choose_capability() {
  const Capability best = of_this_processor();
  const char* wish = std::getenv("AMPKIT_CPU_CAPABILITY");
  if (wish == nullptr || *wish == '\0') return best;
  for (int i = 0; i < 3; ++i)
    if (std::string(wish) == kNames[i]) return std::min(best, static_cast<Capability>(i));
  fail("AMPKIT_CPU_CAPABILITY is '", wish, "'; expected baseline, avx2 or avx512");
}

}  // namespace

Capability capability() {
  static const Capability chosen = choose_capability();
  return chosen;
}

std::string cpu_capability() { return kNames[static_cast<int>(capability())]; }

}  // namespace ampkit
