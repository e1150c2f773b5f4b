"""The passes over lists of gradients that `Gradients` sends them through: each one call of a multi-tensor operation.

What is new is checked on the way where there is a `Check`; a slot's gradient is converted into the one of its target.
"""

from __future__ import annotations

import torch

from .. import kernels
from ..models.weights import move_like
from ..optimizers.scales import Scale, inverse, is_one, on
from .found_inf import Check
from .master_weights import Slot


def unscale(fresh: list[tuple[Slot, torch.Tensor]], factor: Scale, check: Check | None) -> None:
    """Convert and unscale fresh gradients into their targets."""
    if is_one(factor) and check is None:  # copying a tensor onto itself is no work
        fresh = [(slot, gradient) for slot, gradient in fresh if slot.master is not None]
        if not fresh:
            return
    inputs = [gradient for _, gradient in fresh]
    slots = [slot for slot, _ in fresh]
    in_place = not [slot for slot in slots if slot.master is not None]
    outputs = inputs if in_place else [target_gradient(slot, gradient) for slot, gradient in fresh]
    found_inf, first_bad = _places(check, slots)
    kernels.multi_tensor_scale(inputs, outputs, factor, found_inf, first_bad)


def axpby(slots, xs, ys, outputs, a: Scale, b: Scale, check: Check | None) -> None:
    """outputs[i] = a * xs[i] + b * ys[i], where ``xs[i]`` is what is new of ``slots[i]``'s gradient."""
    found_inf, first_bad = _places(check, slots)
    kernels.multi_tensor_axpby(xs, ys, outputs, a, b, found_inf, first_bad=first_bad)


def to_masters(slots: list[Slot], gradients: list[torch.Tensor], factor: Scale) -> None:
    """Convert gradients, times ``factor``, into their masters'."""
    if slots:
        outputs = [target_gradient(slot, gradient) for slot, gradient in zip(slots, gradients)]
        kernels.multi_tensor_scale(gradients, outputs, factor)


def unscaled_norm(slots: list[Slot], scale: Scale, check: Check | None) -> torch.Tensor:
    """Read the model's gradients once: their norm divided by ``scale``, and whether all are finite."""
    found_inf, first_bad = _places(check, slots)
    gradients = [slot.param.grad for slot in slots]
    inv_scale = None if is_one(scale) else inverse(scale)
    return kernels.multi_tensor_unscale_l2norm(gradients, None, inv_scale, found_inf, first_bad=first_bad)[0]


def _places(check: Check | None, slots: list[Slot]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if check is None else (check.found_inf, check.watch([slot.param for slot in slots]))


def combined(norms: list[torch.Tensor]) -> torch.Tensor:
    """The norm of everything, from norms of parts: float32, shape [1], on the device of the first."""
    device = norms[0].device
    wide = torch.float32 if device.type == "mps" else torch.float64
    stacked = torch.cat([on(norm, device).reshape(1) for norm in norms])
    return torch.linalg.vector_norm(stacked, dtype=wide).to(torch.float32).reshape(1)


def scale_in_place(gradients: list[torch.Tensor], factor: Scale) -> None:
    """Multiply gradients, sparse ones too."""
    dense = [values(gradient) for gradient in gradients]
    kernels.multi_tensor_scale(dense, dense, factor)


def join(slot: Slot, factor: Scale) -> None:
    """Add what was set aside, times ``factor``, to the fresh gradient."""
    if slot.aside is not None:
        gradient = slot.param.grad
        if gradient is None:
            slot.param.grad = slot.aside * on(factor, slot.aside.device)
        elif isinstance(factor, torch.Tensor) and gradient.layout is slot.aside.layout is torch.strided:
            # add_(alpha=tensor) would read it.
            kernels.multi_tensor_axpby([gradient], [slot.aside], [gradient], 1.0, factor)
        else:
            gradient.add_(slot.aside * on(factor, slot.aside.device))
        slot.aside = None


def target_gradient(slot: Slot, gradient: torch.Tensor) -> torch.Tensor:
    """Where the unscaled gradient goes: the master's, made where there is none yet, or ``gradient`` itself."""
    if slot.master is None:
        return gradient
    move_like(slot.master, slot.param)
    if slot.master.grad is None or slot.master.grad.layout is not torch.strided:
        slot.master.grad = torch.empty_like(slot.master)
    return slot.master.grad


def collect_sparse(
    slot: Slot, gradient: torch.Tensor, standing: torch.Tensor | None, factor: Scale, check: Check | None
) -> None:
    """Unscale and check a sparse gradient, and add it to what stands in the target."""
    # Coalesced in the target's precision: duplicate indices may add up beyond float16's range.
    total = gradient.to(slot.target.dtype).coalesce() * on(factor, gradient.device)
    if check is not None:
        finite = torch.isfinite(total._values()).all()
        check.found_inf.copy_(torch.maximum(check.found_inf, on((~finite).to(torch.float32), check.found_inf.device)))
    slot.target.grad = total if standing is None else standing + total


def values(gradient: torch.Tensor) -> torch.Tensor:
    """What a gradient stores: all of it, or the values of a sparse one."""
    return gradient if gradient.layout is torch.strided else gradient._values()
