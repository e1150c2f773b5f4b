// torch.ops.ampkit.plan_launches: the launch plan as a table, for tests.
#include "launch_plan.h"

#include <torch/csrc/stable/ops.h>

#include "check.h"
#include "ops.h"

namespace ampkit {

Tensor plan_launches(std::vector<int64_t> sizes, int64_t chunk_size, int64_t max_tensors) {
  AMPKIT_CHECK(chunk_size > 0 && max_tensors > 0, "plan_launches: chunk_size ", chunk_size, ", max_tensors ", max_tensors,
               "; both must be positive");
  const std::vector<Launch> launches = pack_launches(sizes, chunk_size, static_cast<size_t>(max_tensors));
  int64_t rows = 0;
  for (const Launch& launch : launches) rows += launch.first_blocks.back();
  const std::vector<int64_t> shape = {rows, 4};
  Tensor table = torch::stable::empty({shape.data(), shape.size()}, torch::headeronly::ScalarType::Long);
  int64_t* row = static_cast<int64_t*>(table.mutable_data_ptr());
  for (size_t i = 0; i < launches.size(); ++i)
    for (int64_t block = 0; block < launches[i].first_blocks.back(); ++block) {
      const int slot = slot_of(launches[i].first_blocks.data(), static_cast<int>(launches[i].tensors.size()), block);
      *row++ = static_cast<int64_t>(i);
      *row++ = launches[i].tensors[slot];
      *row++ = slot;
      *row++ = block - launches[i].first_blocks[slot];
    }
  return table;
}

}  // namespace ampkit
