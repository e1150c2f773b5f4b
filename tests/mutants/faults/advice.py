"""Faults in what is told of mistakes."""

from ..mutant import Mutant

ADVICE, TESTS = "ampkit/iteration/advice.py", "scaling/test_mistakes.py"

FAULTS = [
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
        "advice: gradients without an optimizer stay scaled",
        "ampkit/session.py",
        "                    unowned.append(session.scaling.unowned)",
        "                    pass",
        breaks="gradients that no optimizer owns are unscaled",
        tests=(f"{TESTS}::test_gradients_that_no_optimizer_owns_are_unscaled_too",),
    ),
    Mutant(
        "advice: torch.autocast's regions do not count in a thread",
        "ampkit/session.py",
        "if loss.dtype in LOWER_PRECISION and self.casting",
        "if self.casting",
        breaks="a thread that computes its loss in float32 is not told of",
        tests=(f"{TESTS}::test_a_thread_that_computes_its_loss_uncast_is_told_of",),
    ),
]
