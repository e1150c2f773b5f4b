"""Unscaling, checking and adding up of gradients, in multi-tensor passes; sparse ones and those with a graph one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .. import kernels
from ..models.float32_values import forget_gradient, put_gradient
from ..optimizers.scales import Scale, inverse, is_one, on
from .found_inf import FoundInf, places_for

Slot = Any  # of gradients.py, which imports this module
SlotGradient = tuple[Slot, torch.Tensor]


@dataclass(eq=False)
class BackwardPass:
    """What has to be known of a backward pass to unscale its gradients.

    Its loss was multiplied by ``scale``. ``local`` says that it ran under ``DDP.no_sync()``. ``exact_in_place`` says that the scale
    is a power of two, so that bfloat16 can be divided by it without rounding. ``done`` are the slots of several optimizers that one
    of them has handled; None where there is only one optimizer.
    """

    scale: Scale
    local: bool = False
    exact_in_place: bool = False
    done: set[Slot] | None = None

    def __post_init__(self) -> None:
        self.inv = inverse(self.scale)

    def take(self, slots: list[Slot]) -> list[Slot]:
        """Those that no other optimizer has handled; they count as handled from here on."""
        if self.done is None:
            return slots
        remaining = [slot for slot in slots if slot not in self.done]
        self.done.update(slot for slot in remaining if slot.owners > 1)
        return remaining


def is_sparse(gradient: torch.Tensor) -> bool:
    return gradient.layout is not torch.strided


def values_of(gradient: torch.Tensor) -> torch.Tensor:
    """What a gradient stores: all of it, or the values of a sparse one."""
    return gradient if gradient.layout is torch.strided else gradient._values()


def bring_to(slots: list[Slot], factor: Scale) -> None:
    """Multiply gradients that stay, in the precision of their weights, in which the backward pass adds to them."""
    inputs, outputs = [], []
    for slot in slots:
        gradient = slot.param.grad
        if gradient is None:
            continue
        if gradient.dtype is not slot.param.dtype and slot.entry is not None and not is_sparse(gradient):
            forget_gradient(slot.param)
            slot.param.grad = torch.empty_like(gradient, dtype=slot.param.dtype)
        elif is_one(factor):
            continue
        inputs.append(values_of(gradient))
        outputs.append(values_of(slot.param.grad))
    kernels.multi_tensor_scale(inputs, outputs, factor)


def unscale(fresh: list[SlotGradient], backward: BackwardPass, found: FoundInf | None) -> None:
    """Unscale gradients where they are, or into float32 where the weight's precision cannot hold the result."""
    inv = backward.inv
    if is_one(inv) and found is None:
        return
    inexact = (torch.float16,) if backward.exact_in_place else (torch.float16, torch.bfloat16)
    params, inputs, outputs, is_in_place = [], [], [], True
    for slot, gradient in fresh:
        output = gradient
        if gradient.layout is not torch.strided:
            _unscale_sparse(slot, gradient, inv, found)
            continue
        if gradient.grad_fn is not None:
            gradient, output = _put_recorded(slot, gradient, inv)
            is_in_place = False
        elif slot.entry is not None and gradient.dtype in inexact:
            output = torch.empty_like(gradient, dtype=torch.float32)
            put_gradient(slot.param, output)
            is_in_place = False
        params.append(slot.param)
        inputs.append(gradient)
        outputs.append(output)
    kernels.multi_tensor_scale(inputs, inputs if is_in_place else outputs, inv, *places_for(found, params))


def add_to_stashes(sums: list[SlotGradient], backward: BackwardPass, found: FoundInf | None) -> None:
    """Add fresh gradients to stashed ones: in float32, where the weight's value is float32."""
    params, fresh, stashes, totals = [], [], [], []
    for slot, gradient in sums:
        if is_sparse(gradient) or is_sparse(slot.stash):
            _add_sparse(slot, gradient, backward.inv, found)
            continue
        total = stash = slot.stash
        is_of_script = stash._is_view()  # of a flat buffer: what autograd leaves is none
        if slot.entry is not None and stash.dtype is not torch.float32 and not is_of_script:
            total = torch.empty_like(stash, dtype=torch.float32)
        slot.stash = None
        if gradient.grad_fn is not None or stash.grad_fn is not None:
            gradient, total = _put_recorded(slot, gradient, backward.inv, stash)
        else:
            put_gradient(slot.param, total)
        params.append(slot.param)
        fresh.append(gradient)
        stashes.append(stash)
        totals.append(total)
    flag, first_bad = places_for(found, params)
    kernels.multi_tensor_axpby(fresh, stashes, totals, backward.inv, 1.0, flag, 0, first_bad)


def _put_recorded(
    slot: Slot, gradient: torch.Tensor, inv: Scale, stash: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """After ``backward(create_graph=True)``: unscale ``param.grad`` for autograd too, since a script may differentiate it again.

    Returns what the kernels, of which autograd knows nothing, read and write.
    """
    with torch.enable_grad():
        dtype = gradient.dtype if slot.entry is None else torch.float32
        total = gradient.to(dtype) * on(inv, gradient.device)
        if stash is not None:
            total = total + stash
    put_gradient(slot.param, total)
    return gradient.detach(), total.detach()


# Sparse gradients, which no multi-tensor kernel takes, one by one


def _unscale_sparse(slot: Slot, gradient: torch.Tensor, inv: Scale, found: FoundInf | None) -> None:
    """``gradient`` * ``inv`` becomes the slot's."""
    # Coalesced in the target's precision: duplicate indices may add up beyond float16's range.
    dtype = slot.param.dtype if slot.entry is None else torch.float32
    total = gradient.to(dtype).coalesce() * on(inv, gradient.device)
    if found is not None:
        finite = torch.isfinite(total._values()).all()
        found.flag.copy_(torch.maximum(found.flag, on((~finite).to(torch.float32), found.flag.device)))
    put_gradient(slot.param, total)


def _add_sparse(slot: Slot, gradient: torch.Tensor, inv: Scale, found: FoundInf | None) -> None:
    """``gradient`` * ``inv`` is added to the slot's stash. The sum is sparse where both are."""
    stash, slot.stash = slot.stash, None
    both = is_sparse(stash) and is_sparse(gradient)
    _unscale_sparse(slot, gradient if is_sparse(gradient) else gradient.to_sparse(), inv, found)
    fresh = slot.param.grad
    put_gradient(
        slot.param, fresh + stash.to(fresh.dtype) if both else _dense(fresh).add_(_dense(stash).to(fresh.dtype))
    )


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if is_sparse(gradient) else gradient
