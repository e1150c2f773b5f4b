"""The ways in which an optimizer takes its step, as rows: `choose` picks one for a step, and says why no better one fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from ..casting.narrow_gradients import stored_gradient
from ..optimizers.fused import FusedOptimizer, StepInputs
from ..optimizers.traits import Traits, has_hooks, lacks_momenta
from .one_pass import OnePassStep

Wrapper = Any  # of optimizer_wrapper.py, which imports this module


class Way(NamedTuple):
    """How an optimizer takes its step.

    ``skips_on_device`` says that it is told there of gradients that are not finite; for others the host reads that.
    ``checks_by_default`` says that at loss scale 1 it looks at its gradients unasked, since that costs no more than a norm.
    ``is_one_kernel`` says that casts need not be off, since nothing is called that could be cast.
    """

    name: str
    skips_on_device: bool
    checks_by_default: bool
    is_one_kernel: bool
    step: Callable[[Wrapper, Callable[[], Any], Tensor | None], Any]


def _with_inputs(wrapper: Wrapper, original: Callable[[], Any], found_inf: Tensor | None) -> Any:
    """Ours: `StepInputs` say what to heed. Without rests it updates float32 copies of stored weights."""

    @contextmanager
    def around() -> Iterator[None]:
        if not wrapper.traits.takes_rests:
            with wrapper.stand_ins.in_step():
                yield
            return
        if has_hooks(optimizer):  # which may have written to gradients
            wrapper.settle()
        optimizer.inputs.rests = {id(slot.param): slot.entry.rest for slot in wrapper.gradients.stored}
        optimizer.inputs.clip = wrapper.gradients.clipping.pending
        yield

    optimizer = wrapper.optimizer()
    optimizer.inputs = StepInputs(
        rests={},
        found_inf=found_inf,
        total_norm=wrapper.gradients.total_norm,
        around=around,
        gradient_of=stored_gradient,
    )
    try:
        return original()
    finally:
        optimizer.inputs = None


def _in_one_pass(wrapper: Wrapper, original: Callable[[], Any], found_inf: Tensor | None) -> Any:
    """torch's SGD, Adam and AdamW: the function that they hand their lists to is another one."""
    optimizer = wrapper.optimizer()
    in_step = wrapper.one_pass.in_step(optimizer, found_inf)
    with wrapper.between_hooks(in_step) if has_hooks(optimizer) else in_step:
        return original()


def _told(wrapper: Wrapper, original: Callable[[], Any], found_inf: Tensor | None) -> Any:
    """torch's with ``fused=True``, to which GradScaler hands the flag like this."""
    if found_inf is None:
        return _of_its_own(wrapper, original, None)
    optimizer = wrapper.optimizer()
    optimizer.grad_scale, optimizer.found_inf = None, found_inf
    try:
        return _of_its_own(wrapper, original, None)
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def _of_its_own(wrapper: Wrapper, original: Callable[[], Any], found_inf: Tensor | None) -> Any:
    """Any other: it updates float32 weights, or float32 copies of stored ones."""
    if not wrapper.gradients.stored:
        return original()
    in_step = wrapper.stand_ins.in_step()
    with wrapper.between_hooks(in_step) if has_hooks(wrapper.optimizer()) else in_step:
        return original()


OURS = Way("ours in one pass", True, True, True, _with_inputs)
OURS_OVER_COPIES = Way("ours over float32 copies", True, True, False, _with_inputs)
IN_ONE_PASS = Way("torch's in one pass", True, True, True, _in_one_pass)
FUSED = Way("torch's fused", True, False, True, _told)
ITS_OWN = Way("its own", False, False, False, _of_its_own)


def choose(wrapper: Wrapper) -> tuple[Way, str | None]:
    """The way of the step that begins, and why weights are not updated in one pass; None where they are."""
    traits, gradients, plan = wrapper.traits, wrapper.gradients, wrapper.owner.plan
    if traits.takes_inputs and traits.takes_rests:
        return OURS, None
    optimizer = wrapper.optimizer()
    reason = why_not_in_one_pass(optimizer, traits, gradients.slots, plan.one_pass_step)
    if traits.takes_inputs:
        return OURS_OVER_COPIES, reason
    # At a loss scale torch's fused ones over float32 weights have the flag too; at 1 they would look at no gradient.
    serves_itself = not gradients.stored and traits.takes_found_inf and plan.loss_scale != 1.0
    if reason is None and (gradients.stored or plan.steps_in_one_pass) and not serves_itself:
        return IN_ONE_PASS, None
    if traits.takes_found_inf and not lacks_momenta(optimizer):
        return FUSED, reason
    return ITS_OWN, reason


def why_not_in_one_pass(optimizer: Any, traits: Traits, slots: list[Any], one_pass_step: bool = True) -> str | None:
    """Why a step of weights in lower precision runs over float32 copies; None where one pass updates weights and rests."""
    name = type(optimizer).__name__
    if isinstance(optimizer, FusedOptimizer):
        if not traits.takes_rests:
            return f"the update of {name} needs float32 parameters"
        return None if traits.takes_inputs else "its step() was replaced before initialize()"
    if not OnePassStep.is_for(optimizer):
        owner = type(optimizer).__module__
        return f"ampkit has no one-pass update of {name if owner.startswith('torch.') else f'{owner}.{name}'}"
    if not one_pass_step:
        return "one_pass_step=False"
    return OnePassStep.reason_against(optimizer, slots) if traits.has_own_step else "its step() is not torch's own"
