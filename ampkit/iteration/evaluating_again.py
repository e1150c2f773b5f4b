"""A step of an optimizer that evaluates its closure several times, as LBFGS does, or may."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from ..errors import ClosureError
from .running_statistics import after_step

Wrapper = Any  # of optimizer_wrapper.py, which imports this module


class _SkippedInClosure(Exception):
    """Unwinds an optimizer whose closure met an overflow."""


def step_evaluating_again(
    wrapper: Wrapper, step: Callable[[Callable], Any], closure: Callable[[], Any], casting_off: Any
) -> Any:
    """The model holds what the optimizer does at each evaluation; an overflow in one takes the whole step back."""
    wrapper.findings.verdict = False
    loss, evaluations = None, 0
    stand_ins, slots = wrapper.stand_ins, wrapper.gradients.slots
    before = [(slot.param, slot.param.detach().clone()) for slot in slots]
    rests = [(slot.entry.rest, slot.entry.rest.clone()) for slot in slots if slot.entry is not None]

    def evaluate() -> Any:
        nonlocal loss, evaluations
        evaluations += 1
        if evaluations > 1 and wrapper.owner.plan.has_dynamic_loss_scale:
            raise ClosureError(
                f"{type(wrapper.optimizer).__name__} evaluated its closure a second time in one step, which a dynamic loss "
                "scale does not allow: the scale may move between two evaluations. Use a static scale (loss_scale=128.0), "
                "or bfloat16 without one (opt_level='O4' or 'O5'). The parameters are as they were before the step."
            )
        if stand_ins.are_in_place:
            stand_ins.put_into_model()
        # As it was where step() was called.
        with getattr(casting_off, "paused", nullcontext)():
            loss = closure()
        wrapper.synchronize_gradients()
        if wrapper.findings.forbid_step():
            raise _SkippedInClosure
        if stand_ins.are_in_place:
            stand_ins.take_gradients()
        return loss

    try:
        with casting_off, stand_ins.in_step():
            result = step(evaluate)
    except (_SkippedInClosure, ClosureError) as error:
        with torch.no_grad():
            for target, value in (*before, *rests):
                target.copy_(value)
        if isinstance(wrapper.optimizer, torch.optim.LBFGS):
            wrapper.optimizer.state.clear()  # it would look for what the rest of the step leaves there
        wrapper.gradients.clipping.end_step()
        if isinstance(error, ClosureError):
            raise
        wrapper.skip()
        return loss
    after_step(wrapper.snapshots, None)
    wrapper.end_step()
    return result
