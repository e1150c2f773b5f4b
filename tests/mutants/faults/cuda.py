"""Faults in the CUDA drivers, planted in the emulation (tests/emulation): no GPU is needed to notice them."""

from ..mutant import Mutant


def fault(name: str, file: str, old: str, new: str, breaks: str, *tests: str) -> Mutant:
    return Mutant(f"cuda {name}", f"csrc/cuda/{file}", old, new, breaks, tests, extension="emulated")


DRIVER, STEP, NORMS = "multi_tensor_apply.cuh", "multi_tensor_step.cuh", "norms.cuh"
ROUNDED, LAMB, EXTREMES = "../moments/cuda_step.cuh", "multi_tensor_step.cuh", "kernels/test_extremes.py"

A_STEP = "kernels/test_step_kernels.py::test_a_step_is_float64s_rounded"
LONG_STEP = "kernels/test_step_kernels.py::test_long_tensors"
LONG_NORM = "kernels/test_kernels.py::test_l2norm_of_a_long_tensor_keeps_its_digits"
MANY = "kernels/test_kernels.py::test_five_thousand_tensors"
NORM_OF_PRODUCTS = "kernels/test_kernels.py::test_unscale_l2norm_is_the_norm_of_the_products"
LAUNCHES = "kernels/test_kernels.py::test_lists_take_few_launches"
SCALE = "kernels/test_kernels.py::test_scale_rounds_the_float32_product"
LAYOUTS = "kernels/test_kernels.py::test_layouts"
SLICE = "kernels/test_kernels.py::test_what_lies_beside_a_slice_is_left_alone"
SPLIT = "kernels/test_split.py::test_the_operators_do_the_same"
WHEREVER = "kernels/test_kernels.py::test_found_inf_wherever_the_value_hides"
FIRST_BAD = "kernels/test_kernels.py::test_first_bad_is_the_smallest_index_and_only_falls"

FAULTS = [
    # Weights and rests
    fault(
        "split: rests have no sign",
        DRIVER,
        "static_cast<int16_t>(half_word(raw_rests, k))",
        "static_cast<int32_t>(half_word(raw_rests, k))",
        "weight and rest together are the value",
        SPLIT,
    ),
    fault(
        "split: float16 is joined as bfloat16",
        DRIVER,
        "is_half ? join<true>(weight, rest) : join<false>(weight, rest)",
        "join<false>(weight, rest)",
        "weights of either dtype are joined with their rests",
        SPLIT,
    ),
    fault(
        "split: float16 is split as bfloat16",
        DRIVER,
        "is_half ? split<true>(values[k], weight, rest) : split<false>(values[k], weight, rest);",
        "split<false>(values[k], weight, rest);",
        "a rest is what the weight in its own dtype lacks",
        SPLIT,
    ),
    fault(
        "split: weights and rests change places",
        "multi_tensor_split.cu",
        "chunk.join_rests(0, chunk.fetch(0, i), chunk.fetch(1, i), values);",
        "chunk.join_rests(0, chunk.fetch(1, i), chunk.fetch(0, i), values);",
        "weight and rest together are the value",
        SPLIT,
    ),
    fault(
        "split: all stretches of a chunk are joined into the first",
        "multi_tensor_split.cu",
        "chunk.store(2, i, values);",
        "chunk.store(2, threadIdx.x * kWidth, values);",
        "each element is written to its own place",
        SPLIT,
    ),
    fault(
        "split: all stretches of a chunk are split into the first",
        "multi_tensor_split.cu",
        "chunk.store_split(1, 2, i, values);",
        "chunk.store_split(1, 2, threadIdx.x * kWidth, values);",
        "each element is written to its own place",
        SPLIT,
    ),
    fault(
        "step: the first stretch's rests serve all",
        STEP,
        "raw[list] = chunk.fetch(list, i);  // nothing beyond the end\n      if (splits) rests = chunk.fetch(kLower, i);",
        "raw[list] = chunk.fetch(list, i);",
        "each parameter has its own rest",
        "kernels/test_split.py::test_a_step_of_weights_with_rests_is_that_of_their_float32_values",
    ),
    fault(
        "step: weights with rests are stored without them",
        STEP,
        "chunk.store_split(1, kLower, i, values[1]);",
        "chunk.store(1, i, values[1]);",
        "a step leaves the rests of the weights that it leaves",
        "kernels/test_split.py::test_a_step_of_weights_with_rests_is_that_of_their_float32_values",
    ),
    # Barriers
    fault(
        "step: the functor is used before it is made",
        STEP,
        "if (threadIdx.x == 0) shared = Functor(settings);\n    __syncthreads();",
        "if (threadIdx.x == 0) shared = Functor(settings);",
        "threads wait for what one of them writes to shared memory",
        A_STEP,
    ),
    fault(
        "sum: warps are added before all are there",
        NORMS,
        "if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;\n  __syncthreads();",
        "if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;",
        "the sums of all warps are there when they are added",
        LONG_NORM,
    ),
    fault(
        "sum: a second one writes over the first",
        NORMS,
        "__syncthreads();  // an earlier sum may still be read\n"
        "  for (int step = 16; step > 0; step /= 2) value += __shfl_down_sync(0xffffffff, value, step);",
        "for (int step = 16; step > 0; step /= 2) value += __shfl_down_sync(0xffffffff, value, step);",
        "a sum is read before the next one is written in its place",
        LONG_STEP,
        A_STEP,
    ),
    fault(
        "sum: half of the threads leave before the barrier",
        "multi_tensor_unscale_l2norm.cu",
        "sum = block_sum(sum);",
        "sum = threadIdx.x < 256 ? block_sum(sum) : 0;",
        "all threads of a block reach each of its barriers",
        LONG_NORM,
    ),
    # Reductions
    fault(
        "sum: half of the warps count twice",
        NORMS,
        "threadIdx.x < kThreads / 32 ? of_warp[threadIdx.x] : 0.0",
        "of_warp[threadIdx.x % (kThreads / 32)]",
        "each warp counts once",
        LONG_NORM,
    ),
    fault(
        "sum: the last block is left out",
        NORMS,
        "i < last",
        "i + 1 < last",
        "all blocks of a tensor count",
        LONG_NORM,
    ),
    fault(
        "finding: only the first thread looks",
        DRIVER,
        "__syncthreads_or(highest_magnitude >= kInfinityBits)",
        "highest_magnitude >= kInfinityBits",
        "what any thread of a block finds counts",
        WHEREVER,
    ),
    fault(
        "finding: the last tensor wins",
        DRIVER,
        "atomicMin(reinterpret_cast<long long*>(findings.first_bad), static_cast<long long>(tensor));",
        "*findings.first_bad = tensor;",
        "first_bad is the smallest index, in whatever order blocks come",
        FIRST_BAD,
        MANY,
    ),
    fault(
        "squares: float32 wherever it is",
        NORMS,
        "is_safe(sum) || highest_magnitude(values) == 0",
        "true",
        "squares outside of float32's range count",
        "kernels/test_kernels.py::test_l2norm_survives_squares_outside_float32",
    ),
    fault(
        "step: every second stretch of a chunk is left out",
        STEP,
        "i += kStride;",
        "i += 2 * kStride;",
        "a block takes all elements of its chunk",
        LONG_STEP,
    ),
    # Chunks
    fault(
        "chunk: all blocks take the first chunk",
        DRIVER,
        "static_cast<int64_t>(block - table.first_block_of[slot]) * kChunkSize",
        "int64_t{0}",
        "each block takes its own chunk of a long tensor",
        WHEREVER,
    ),
    fault(
        "chunk: 16-bit tensors are counted as float32",
        DRIVER,
        "offset * bytes_per_element(chunk.dtype[k])",
        "offset * 4",
        "a chunk begins where the elements before it end",
        WHEREVER,
    ),
    fault(
        "chunk: slots are mixed up",
        DRIVER,
        "slot_of(table.first_block_of, table.tensors, block)",
        "0",
        "each block takes the tensor that it was given",
        SCALE,
    ),
    fault(
        "chunk: a launch carries no more than it used to",
        DRIVER,
        "pack_launches(sizes, kChunkSize, Table::kMaxTensors)",
        "pack_launches(sizes, kChunkSize, 192)",
        "a launch carries as many tensors as its arguments have room for",
        LAUNCHES,
    ),
    Mutant(
        "cpp plan: the search stops one too soon",
        "csrc/launch_plan.h",
        "beyond - slot > 1",
        "beyond - slot > 2",
        breaks="each block takes the tensor that it was given",
        tests=("kernels/test_kernels.py::test_launch_plan",),
    ),
    fault(
        "chunk: each launch begins anew with its blocks",
        DRIVER,
        "first_block += blocks;",
        "",
        "blocks are counted over all launches",
        MANY,
    ),
    fault(
        "ranges: each launch begins anew with the tensors",
        NORMS,
        "finish(start + blockIdx.x, ranges.first[blockIdx.x], ranges.first[blockIdx.x + 1]);",
        "finish(blockIdx.x, ranges.first[blockIdx.x], ranges.first[blockIdx.x + 1]);",
        "more tensors than a launch carries have a norm each",
        MANY,
    ),
    # Alignment and tails
    fault(
        "alignment: views are taken for aligned",
        DRIVER,
        "reinterpret_cast<uintptr_t>(chunk.data[k]) % 16 == 0",
        "true",
        "16 bytes are read at once only where they are aligned",
        LAYOUTS,
    ),
    fault(
        "tail: float32 is read beyond the end",
        DRIVER,
        "raw.words[k] = i + k < size ? from[k] : 0;",
        "raw.words[k] = from[k];",
        "what lies beyond the end of a tensor counts nowhere",
        NORM_OF_PRODUCTS,
    ),
    fault(
        "tail: float32 is written beyond the end",
        DRIVER,
        "if (i + k < size) to[k] = words[k];",
        "to[k] = words[k];",
        "nothing is written beyond the end of a tensor",
        SLICE,
    ),
    fault(
        "tail: 16 bits are written beyond the end",
        DRIVER,
        "if (i + k < size) to[k] = static_cast<uint16_t>(words[k]);",
        "to[k] = static_cast<uint16_t>(words[k]);",
        "nothing is written beyond the end of a tensor",
        SLICE,
    ),
    fault(
        "tail: neighbours change places",
        DRIVER,
        "even | odd << 16",
        "even << 16 | odd",
        "two 16-bit elements are taken in their order",
        SCALE,
    ),
    # Drivers
    fault(
        "scale: both halves of a batch are written to one place",
        "multi_tensor_scale.cu",
        "chunk.store(1, start + b * kStride, out);",
        "chunk.store(1, start, out);",
        "each element is written where it was read",
        SCALE,
    ),
    fault(
        "update_scale: the launch is not checked",
        "update_scale.cu",
        "STD_CUDA_KERNEL_LAUNCH_CHECK();",
        "",
        "an error of a launch is told where it happened",
        "kernels/test_kernels.py::test_update_scale_is_the_rule_in_plain_numbers",
    ),
    # The ends of what kernels take
    fault(
        "edge: offsets of chunks are 32 bits",
        DRIVER,
        "static_cast<int64_t>(block - table.first_block_of[slot]) * kChunkSize",
        "(block - table.first_block_of[slot]) * kChunkSize",
        "a tensor may have more than 2^31 elements",
        f"{EXTREMES}::test_a_launch_has_a_block_for_each_chunk_past_two_to_the_32_elements",
    ),
    fault(
        "edge: offsets in bytes are 32 bits",
        DRIVER,
        "offset * bytes_per_element(chunk.dtype[k])",
        "static_cast<int32_t>(offset * bytes_per_element(chunk.dtype[k]))",
        "a tensor may have more than 2^31 bytes",
        f"{EXTREMES}::test_what_lies_past_two_to_the_31_bytes_is_read",
    ),
    fault(
        "edge: a grid has 65535 blocks",
        DRIVER,
        "static_cast<unsigned>(launch.first_blocks.back())",
        "std::min(static_cast<unsigned>(launch.first_blocks.back()), 65535u)",
        "a launch has a block for each chunk",
        f"{EXTREMES}::test_a_launch_has_a_block_for_each_chunk_past_two_to_the_32_elements",
    ),
    fault(
        "edge: codes are written beyond the end",
        ROUNDED,
        "if (i + k < size) codes[i + k] = static_cast<uint8_t>(words[k / 4] >> (k % 4 * 8));",
        "codes[i + k] = static_cast<uint8_t>(words[k / 4] >> (k % 4 * 8));",
        "nothing is written beyond the end of packed moments",
        f"{EXTREMES}::test_nothing_beside_packed_moments_rests_and_weights_is_touched",
    ),
    fault(
        "edge: codes beyond the end have a place",
        ROUNDED,
        "if (i + k >= size) places[k] = 0;",
        "",
        "what lies beyond the end of packed moments counts nowhere",
        "kernels/test_moments.py::test_a_step_over_values_of_all_classes_packs_what_it_would_write_in_float32",
    ),
    fault(
        "edge: lamb divides 0 by 0 beyond the end",
        LAMB,
        "if (Functor::kSumsSquares && i + k >= chunk.size) values[1][k] = 0.0f;",
        "",
        "what lies beyond the end of a tensor counts nowhere",
        f"{EXTREMES}::test_lamb_without_eps_divides_by_nothing_behind_the_end",
    ),
]
