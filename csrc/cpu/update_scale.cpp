// update_scale on the CPU: a few numbers.
#include "functors/update_scale.h"

#include "check.h"
#include "ops.h"
#include "scale_arguments.h"

namespace ampkit {

void update_scale_cpu(const Tensor& state, const Tensor& found_inf, double growth_factor, double backoff_factor,
                      int64_t growth_interval, int64_t hysteresis, double min_scale, double max_scale) {
  const ScaleArguments arguments(state, found_inf);
  const UpdateScaleFunctor update{growth_factor, backoff_factor, growth_interval, hysteresis, static_cast<float>(min_scale),
                                  static_cast<float>(max_scale)};
  update(*arguments.state, *arguments.found_inf);
}

}  // namespace ampkit
