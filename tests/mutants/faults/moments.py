"""Faults in moments in lower precision and in numbers drawn: the reference, the optimizers, both devices' kernels."""

from ..mutant import Mutant

KERNELS, OPTIMIZERS = "kernels/test_moments.py::", "optimizers/test_narrow_moments.py::"
PACKS = KERNELS + "test_a_step_packs_what_it_would_write_in_float32"
DRAWN = KERNELS + "test_parameters_in_bfloat16_are_rounded_by_numbers_drawn"


def fault(name: str, file: str, old: str, new: str, breaks: str, *tests: str, **how: str) -> Mutant:
    return Mutant(f"moments: {name}", file, old, new, breaks, tests, **how)


FAULTS = [
    fault(
        "a value is cut off, not rounded",
        "ampkit/kernels/moments.py",
        "dither = 1 << (_DROPPED - 1)",
        "dither = 0",
        "to nearest a value is off by half a place at most",
        KERNELS + "test_to_nearest_a_value_is_off_by_a_sixteenth_of_itself",
    ),
    fault(
        "a second moment too small is stored as zero",
        "ampkit/kernels/moments.py",
        "codes = torch.where(magnitudes != 0, (places - base).clamp(min=1), 0)",
        "codes = (places - base).clamp(min=0)",
        "a second moment that is not zero is never stored as zero",
        KERNELS + "test_a_second_moment_that_is_not_zero_is_never_stored_as_zero",
    ),
    fault(
        "a value on the grid may move",
        "ampkit/kernels/moments.py",
        "(_blocks(drawn.reshape(-1)) << (_DROPPED - 16)) + (1 << (_DROPPED - 17))",
        "(_blocks(drawn.reshape(-1)) << (_DROPPED - 15)) + (1 << (_DROPPED - 17))",
        "by numbers drawn a value becomes one of its two neighbours, right in the mean",
        KERNELS + "test_by_numbers_drawn_a_value_becomes_a_neighbour_and_the_mean_is_right",
    ),
    fault(
        "Philox leaves out a round",
        "ampkit/kernels/moments.py",
        "for _ in range(10):",
        "for _ in range(9):",
        "random numbers are those of Philox4x32-10",
        KERNELS + "test_philox_gives_the_known_answers",
    ),
    fault(
        "every list draws the same numbers",
        "ampkit/kernels/moments.py",
        "calls >> 32 | stream << 24",
        "calls >> 32",
        "a parameter and its moments are rounded by numbers of their own",
        KERNELS + "test_numbers_drawn_hang_on_seed_step_position_list_and_element",
    ),
    fault(
        "parameters are rounded to nearest",
        "ampkit/optimizers/rounding.py",
        'return cls(STATE_DTYPES[name], rounding == "stochastic")',
        "return cls(STATE_DTYPES[name])",
        "rounding='stochastic' rounds parameters by numbers drawn",
        OPTIMIZERS + "test_stochastic_rounding_takes_steps_that_nearest_loses",
    ),
    fault(
        "checkpoints hold codes",
        "ampkit/optimizers/fused.py",
        'saved["state"][key] = self.rounding.widened(saved["state"][key], param)',
        "pass",
        "checkpoints hold moments in float32",
        OPTIMIZERS + "test_checkpoints_are_in_float32_and_give_the_same_bits_when_they_are_loaded",
    ),
    fault(
        "state that is loaded stays wide",
        "ampkit/optimizers/fused.py",
        "self.rounding.narrow(self.state[param], param)",
        "pass",
        "state that is loaded is stored as all other state",
        OPTIMIZERS + "test_state_in_float32_loads_into_8_bits",
    ),
    fault(
        "positions are those in the list",
        "ampkit/optimizers/fused.py",
        "values = [float(places[id(param)]) for param in batch.params]",
        "values = [float(i) for i in range(len(batch.params))]",
        "a parameter's numbers do not hang on who else has a gradient",
        OPTIMIZERS + "test_a_parameter_that_is_left_out_of_some_steps_keeps_its_numbers",
    ),
    fault(
        "cpp: the block's highest place is a place too high",
        "csrc/functors/moments.h",
        "highest > Code::kHighest ? highest - Code::kHighest : 0",
        "highest > Code::kHighest ? highest - Code::kHighest + 1 : 0",
        "codes count from the place that the format says",
        PACKS,
    ),
    fault(
        "cuda: every list draws the same numbers",
        "csrc/functors/philox.h",
        "static_cast<uint32_t>(call >> 32) | stream << 24",
        "static_cast<uint32_t>(call >> 32)",
        "a parameter and its moments are rounded by numbers of their own",
        DRAWN,
        extension="emulated",
    ),
    fault(
        "cpu: every list draws the same numbers",
        "csrc/cpu/rounded_step_block.h",
        "all_calls(stream << 24)",
        "all_calls(0)",
        "a parameter and its moments are rounded by numbers of their own",
        DRAWN,
    ),
    fault(
        "cpp: the step is left out of the counter",
        "csrc/functors/rounding.h",
        "static_cast<uint32_t>(step.get())",
        "0u",
        "each step draws numbers of its own",
        PACKS,
    ),
    fault(
        "cpu: numbers begin anew in each tile",
        "csrc/cpu/rounded_step_block.h",
        "static_cast<uint64_t>(offset / kDraws + i)",
        "static_cast<uint64_t>(i)",
        "each element of a tensor draws its own number",
        PACKS,
    ),
    fault(
        "cpu: scales lie behind the codes of the tile",
        "csrc/cpu/rounded_step_block.h",
        "offset / kMomentBlock",
        "0",
        "each block has a scale of its own",
        PACKS,
    ),
    fault(
        "cuda: half of a warp is asked",
        "csrc/cuda/rounded_step.cuh",
        "found = other > found ? other : found;",
        "found = bits < 16 && other > found ? other : found;",
        "a block's scale is the highest of all its lanes",
        PACKS,
        extension="emulated",
    ),
    fault(
        "cuda: numbers begin anew in each chunk",
        "csrc/cuda/rounded_step.cuh",
        "(chunk.offset + i) / kDraws",
        "i / kDraws",
        "each element of a tensor draws its own number",
        PACKS,
        extension="emulated",
    ),
    fault(
        "cuda: parameters are rounded to nearest",
        "csrc/cuda/rounded_step.cuh",
        "rounding.draws() && rounding.params",
        "rounding.draws() && !rounding.params",
        "with round_params parameters are rounded by numbers drawn",
        DRAWN,
        extension="emulated",
    ),
]
