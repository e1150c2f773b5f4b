"""Float32 stand-ins for weights in lower precision, inside of the step of an optimizer that knows nothing of rests.

For the time of the step torch swaps what two Python objects stand for: the model's own parameters are float32 then, with values
and gradients of the weights, whoever names them. Groups, state and lists of an optimizer's own stay as they are. Afterwards what
the step made of them is split into weights and rests. A new dtype for a weight itself would cost it the hooks of DDP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .. import kernels
from ..dtypes import LOWER_PRECISION
from ..errors import ClosureError
from ..models.float32_values import forget_gradient
from .gradients import Gradients


@contextmanager
def in_float32(gradients: Gradients, has_values: bool = True) -> Iterator[None]:
    """Have parameters of stored weights be float32 inside; what becomes of their values, if they have any, goes to the weights."""
    if not gradients.stored or gradients.are_float32:
        yield
        return
    try:
        put_in(gradients, has_values)
        yield
        if has_values:
            put_into_weights(gradients)
    finally:
        take_out(gradients)


@torch.no_grad()
def put_in(gradients: Gradients, has_values: bool = True) -> None:
    """Put stand-ins in the places of the weights, with values and gradients as they are in the model."""
    slots, found = gradients.stored, gradients.in_float32() if has_values else {}
    for slot in slots:
        slot.entry.loans.end(slot.entry)
        slot.entry.move_rest_beside(slot.param)
    stand_ins = [
        nn.Parameter(torch.empty_like(slot.param, dtype=torch.float32), slot.param.requires_grad) for slot in slots
    ]
    values = [stand_in.detach() for stand_in in stand_ins]
    if has_values:
        kernels.multi_tensor_join([slot.param for slot in slots], [slot.entry.rest for slot in slots], values)
    for slot, stand_in in zip(slots, stand_ins):
        stand_in.grad = found.get(slot)
        slot.weight = stand_in
        torch._C._swap_tensor_impl(slot.param, stand_in)


@torch.no_grad()
def put_into_weights(gradients: Gradients) -> None:
    """Split the values into weights and rests. A gradient that the step has cleared is cleared."""
    slots = gradients.stored
    values, weights = [slot.param.detach() for slot in slots], [slot.weight for slot in slots]
    kernels.multi_tensor_split(values, weights, [slot.entry.rest for slot in slots])
    for slot in slots:
        if slot.param.grad is None and slot.weight.grad is not None:
            forget_gradient(slot.weight)


def take_out(gradients: Gradients) -> None:
    """Have the parameters be the weights again."""
    for slot in gradients.stored:
        if slot.weight is not None and slot.weight.dtype in LOWER_PRECISION:  # else the swap was not reached
            torch._C._swap_tensor_impl(slot.param, slot.weight)
        slot.weight = None


def inner_optimizers(optimizer: Any) -> Sequence[Any]:
    """Optimizers that an optimizer holds, over parameters of its own groups."""
    own = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return [
        inner
        for inner in getattr(optimizer, "__dict__", {}).values()
        if all(hasattr(inner, name) for name in ("param_groups", "state", "step"))
        and not own.isdisjoint(id(param) for group in inner.param_groups for param in group["params"])
    ]


# A step that evaluates its closure several times, as LBFGS does, or may

Wrapper = Any  # of optimizer_wrapper.py, which imports this module


class _SkippedInClosure(Exception):
    """Unwinds an optimizer whose closure met an overflow."""


_SECOND_EVALUATION = (
    "{} evaluated its closure a second time in one step, which a dynamic loss scale does not allow: the scale may move between "
    "two evaluations. Use a static scale (loss_scale=128.0), or bfloat16 without one (opt_level='O4' or 'O5'). The parameters "
    "are as they were before the step."
)


def step_evaluating_again(
    wrapper: Wrapper, step: Callable[[Callable], Any], closure: Callable[[], Any], casting_off: Any
) -> Any:
    """The model holds what the optimizer does at each evaluation; an overflow in one takes the whole step back."""
    wrapper.findings.of_step = None
    loss, evaluations, gradients = None, 0, wrapper.gradients
    before = _copies(gradients.slots)

    def evaluate() -> Any:
        nonlocal loss, evaluations
        evaluations += 1
        if evaluations > 1 and wrapper.owner.plan.has_dynamic_loss_scale:
            raise ClosureError(_SECOND_EVALUATION.format(type(wrapper.optimizer()).__name__))
        if gradients.stored:
            put_into_weights(gradients)
            take_out(gradients)
        with getattr(casting_off, "paused", nullcontext)():  # as where step() was called
            loss = closure()
        wrapper.settle()
        if wrapper.findings.forbid_step(wrapper.checks_step()):
            raise _SkippedInClosure
        if gradients.stored:
            put_in(gradients)
        return loss

    try:
        with casting_off, in_float32(gradients):
            result = step(evaluate)
    except (_SkippedInClosure, ClosureError) as error:
        with torch.no_grad():
            for target, value in before:
                target.copy_(value)
        if isinstance(wrapper.optimizer(), torch.optim.LBFGS):
            wrapper.optimizer().state.clear()  # it would look for what the rest of the step leaves there
        if isinstance(error, ClosureError):
            gradients.clipping.end_step()
            raise
        wrapper.end_step(skipped=True)
        return loss
    wrapper.end_step()
    return result


def _copies(slots: Iterable[Any]) -> list[tuple[Tensor, Tensor]]:
    """Each parameter and each rest, with a copy of its values."""
    values = [slot.param.detach() for slot in slots] + [slot.entry.rest for slot in slots if slot.entry is not None]
    return [(value, value.clone()) for value in values]
