"""Faults in what is told of mistakes."""

from ..mutant import Mutant

ADVICE, TESTS = "ampkit/iteration/advice.py", "scaling/test_mistakes.py"

FAULTS = [
    Mutant(
        "advice: rows are told again and again",
        ADVICE,
        "        self._done.add(row)",
        "        pass",
        breaks="a row is told once",
        tests=(f"{TESTS}::test_a_backward_pass_by_habit_is_told_once",),
    ),
    Mutant(
        "advice: backward passes of a GradScaler's loop count as outside",
        ADVICE,
        "if wrapper.is_outside_of_blocks(thread)]",
        "if wrapper.has_scale]",
        breaks="gradients that arrive at a loss scale are not told of",
        tests=(f"{TESTS}::test_what_is_right_is_not_told_of",),
    ),
    Mutant(
        "advice: every backward pass outside counts, whatever it reaches",
        ADVICE,
        "if all(map(is_still, gradients)):",
        "if False:",
        breaks="the backward pass of another model is not told of",
        tests=(f"{TESTS}::test_what_is_right_is_not_told_of",),
    ),
    Mutant(
        "advice: gradients of no block are not looked at",
        "ampkit/iteration/optimizer_wrapper.py",
        "type(self.optimizer).__name__)\n        return True",
        "type(self.optimizer).__name__)\n        return self.checks_step",
        breaks="a NaN of a backward pass outside of every block does not reach the weights",
        tests=(f"{TESTS}::test_its_nan_does_not_reach_the_weights",),
    ),
    Mutant(
        "advice: what was cleared is told of",
        "ampkit/iteration/found_inf.py",
        "        self._flag = self._witness = None\n        self.came_through_no_block = False\n",
        "        self._flag = self._witness = None\n",
        breaks="gradients that the script has thrown away are not told of",
        tests=(f"{TESTS}::test_its_nan_does_not_reach_the_weights", f"{TESTS}::test_what_is_right_is_not_told_of"),
    ),
    Mutant(
        "advice: gradients without an optimizer stay scaled",
        "ampkit/session.py",
        "                    unowned.append(session.scaling.unowned)",
        "                    pass",
        breaks="gradients that no optimizer owns are unscaled",
        tests=(f"{TESTS}::test_gradients_that_no_optimizer_owns_are_unscaled_too",),
    ),
    Mutant(
        "advice: gradients without an optimizer are not checked",
        "ampkit/iteration/loss_scaling.py",
        "        gradients.collect(backward, found)",
        "        gradients.collect(backward, None)",
        breaks="an overflow in a gradient that no optimizer owns skips the step",
        tests=(f"{TESTS}::test_an_overflow_in_them_skips_the_step",),
    ),
    Mutant(
        "advice: gradients without an optimizer stay inf",
        "ampkit/iteration/loss_scaling.py",
        "            gradients.zero_where(found.flag)",
        "            pass",
        breaks="an overflow in a gradient that no optimizer owns ends with its iteration",
        tests=(f"{TESTS}::test_an_overflow_in_them_skips_the_step",),
    ),
    Mutant(
        "advice: a parameter that an optimizer got later is unscaled twice",
        "ampkit/iteration/loss_scaling.py",
        "        if number != self._number_owned:",
        "        if self._number_owned == -1:",
        breaks="a gradient is unscaled once",
        tests=(f"{TESTS}::test_parameters_that_change_sides_later_are_unscaled_once",),
    ),
    Mutant(
        "advice: torch.autocast's regions do not count in a thread",
        "ampkit/session.py",
        "if loss.dtype in LOWER_PRECISION and self.casting",
        "if self.casting",
        breaks="a thread that computes its loss in float32 is not told of",
        tests=(f"{TESTS}::test_a_thread_that_computes_its_loss_uncast_is_told_of",),
    ),
    Mutant(
        "loss scale: a loss that is not finite is cured by a lower scale",
        "ampkit/iteration/loss_scale.py",
        "            if math.isfinite(loss) and not self.is_one:",
        "            if True:",
        breaks="no lower scale is advised against a NaN of the forward pass",
        tests=(f"{TESTS}::test_no_scale_is_advised_against_a_loss_that_is_not_finite",),
    ),
]
