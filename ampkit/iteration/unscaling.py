"""The gradients of a backward pass: unscaled where they are, or added to those of earlier blocks, and checked on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .. import kernels
from ..optimizers.scales import Scale, inverse, is_one, on
from .found_inf import FoundInf, places_for
from .gradient_groups import grouped
from .master_weights import Exact, Seen, Slot
from .sparse_gradients import add_sparse, is_sparse, unscale_sparse, values_of

LISTS_OF_A_COLLECTION = 6  #: how many lists a collection checks at most, but for rare mixtures

SlotGradient = tuple[Slot, torch.Tensor]


@dataclass(eq=False)
class BackwardPass:
    """What has to be known of a backward pass to unscale its gradients.

    Its loss was multiplied by ``scale``. ``local`` says that it ran under ``DDP.no_sync()``. ``exact_in_place`` says that the scale
    is a power of two, so that bfloat16 can be divided by it without rounding. ``done`` are the slots of several optimizers that one
    of them has handled; None where there is only one optimizer. ``was_reached`` tells whether the pass came to a parameter.
    """

    scale: Scale
    local: bool = False
    exact_in_place: bool = False
    done: set[Slot] | None = None
    was_reached: Callable[[torch.Tensor], bool] | None = None

    def __post_init__(self) -> None:
        self.inv = inverse(self.scale)

    def not_done(self, slots: list[Slot]) -> list[Slot]:
        """Those that no other optimizer has handled; from now on nobody else does."""
        if self.done is None:
            return slots
        remaining = [slot for slot in slots if slot not in self.done]
        self.done.update(slot for slot in remaining if slot.owners > 1)
        return remaining

    def was_cleared(self, slot: Slot) -> bool:
        """Whether a parameter without a gradient had one, which was cleared inside of the block."""
        return self.was_reached is not None and self.was_reached(slot.param)


def unscale(
    fresh: list[SlotGradient], backward: BackwardPass, found: FoundInf | None, in_buckets: bool, leaves_scaled: bool
) -> None:
    """Unscale gradients where they are. What is rounded on the way is kept as it was beside them."""
    scale, inv = backward.scale, backward.inv
    multiplies = not is_one(inv)
    if not multiplies and found is None:
        return
    params, inputs, outputs, kept, left = [], [], [], [], []
    for slot, gradient in fresh:
        output = gradient
        if gradient.layout is not torch.strided:
            unscale_sparse(slot, gradient, inv, found)
            continue
        if multiplies and slot.master is not None:
            if leaves_scaled:
                left.append((slot, gradient))
                continue
            if not (backward.exact_in_place and gradient.dtype is torch.bfloat16):
                if in_buckets or gradient._is_view():  # others see it there
                    kept.append((slot, gradient, gradient.clone()))
                else:
                    output = slot.param.grad = torch.empty_like(gradient)
                    kept.append((slot, output, gradient))
        params.append(slot.param)
        inputs.append(gradient)
        outputs.append(output)
    kernels.multi_tensor_scale(inputs, outputs if kept else inputs, inv, *places_for(found, params))
    for slot, output, values in kept:
        slot.exact = Exact(values, scale, Seen.now(output))
    if left and found is not None:
        flag, first_bad = places_for(found, [slot.param for slot, _ in left])
        kernels.multi_tensor_unscale_l2norm([gradient for _, gradient in left], None, None, flag, first_bad=first_bad)
    for slot, gradient in left:
        slot.exact = Exact(gradient, scale, Seen.now(gradient), is_scaled=True, left_at=scale)


def add(sums: list[SlotGradient], backward: BackwardPass, found: FoundInf | None, leaves_scaled: bool) -> None:
    """Add fresh gradients to stashed ones: in float32, where the parameter is in lower precision."""
    scale, inv = backward.scale, backward.inv
    own, mastered = [], []
    fresh: dict[Slot, torch.Tensor] = {}
    for slot, gradient in sums:
        if slot.owners > 1 and slot.found_inf is not None:
            _drop_if(slot, slot.found_inf.flag)
        if is_sparse(gradient) or is_sparse(slot.stash):
            add_sparse(slot, gradient, inv, found)
            continue
        fresh[slot] = gradient
        (own if slot.master is None else mastered).append((slot, slot.stash))
    if own:
        places = places_for(found, [slot.param for slot, _ in own])
        stashes = [stash for _, stash in own]
        kernels.multi_tensor_axpby(
            [fresh[slot] for slot, _ in own], stashes, stashes, inv, 1.0, places[0], 0, places[1]
        )
    leaves_scaled = leaves_scaled and not is_one(scale)
    for group in grouped(mastered):
        totals = group.in_float32()
        group.accumulate([fresh[slot] for slot in group.slots], totals, inv, found)
        if leaves_scaled:
            kernels.multi_tensor_scale(totals, group.gradients, scale)
        for slot, total, gradient in zip(group.slots, totals, group.gradients):
            slot.exact = Exact(total, 1.0, Seen.now(gradient), leaves_scaled, scale)
    for slot in fresh:
        slot.param.grad, slot.stash = slot.stash, None


def multiply(gradients: list[SlotGradient], factor: Scale) -> None:
    """Multiply these gradients of slots, as exactly as they are known, where they are."""
    sparse = [values_of(gradient) for _, gradient in gradients if is_sparse(gradient)]
    kernels.multi_tensor_scale(sparse, sparse, factor)
    for group in grouped((slot, gradient) for slot, gradient in gradients if not is_sparse(gradient)):
        group.write(group.gradients, factor)


def _drop_if(slot: Slot, found_inf: torch.Tensor) -> None:
    """A contribution that was not finite is no part of the sum."""

    def without(values: torch.Tensor) -> torch.Tensor:
        return torch.where(on(found_inf, values.device) != 0, torch.zeros_like(values), values)

    exact, slot.exact, slot.stash = slot.exact, None, without(slot.stash)
    if exact is not None and exact.is_scaled:
        slot.exact = exact._replace(values=without(exact.values)).moved(slot.stash)
