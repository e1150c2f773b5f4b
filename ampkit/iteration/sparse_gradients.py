"""Sparse gradients, which no multi-tensor kernel takes: unscaled and added one by one, in float32 where the value is float32."""

from __future__ import annotations

import torch

from ..models.float32_values import put_gradient
from ..optimizers.scales import Scale, on
from .found_inf import FoundInf
from .slots import Slot


def is_sparse(gradient: torch.Tensor) -> bool:
    return gradient.layout is not torch.strided


def values_of(gradient: torch.Tensor) -> torch.Tensor:
    """What a gradient stores: all of it, or the values of a sparse one."""
    return gradient._values() if is_sparse(gradient) else gradient


def unscale_sparse(slot: Slot, gradient: torch.Tensor, inv: Scale, found: FoundInf | None) -> None:
    """``gradient`` * ``inv`` becomes the slot's."""
    # Coalesced in the target's precision: duplicate indices may add up beyond float16's range.
    dtype = slot.param.dtype if slot.entry is None else torch.float32
    total = gradient.to(dtype).coalesce() * on(inv, gradient.device)
    if found is not None:
        finite = torch.isfinite(total._values()).all()
        found.flag.copy_(torch.maximum(found.flag, on((~finite).to(torch.float32), found.flag.device)))
    put_gradient(slot.param, total)


def add_sparse(slot: Slot, gradient: torch.Tensor, inv: Scale, found: FoundInf | None) -> None:
    """``gradient`` * ``inv`` is added to the slot's stash. The sum is sparse where both are."""
    stash, slot.stash = slot.stash, None
    both = is_sparse(stash) and is_sparse(gradient)
    unscale_sparse(slot, gradient if is_sparse(gradient) else gradient.to_sparse(), inv, found)
    fresh = slot.param.grad
    put_gradient(
        slot.param, fresh + stash.to(fresh.dtype) if both else _dense(fresh).add_(_dense(stash).to(fresh.dtype))
    )


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if is_sparse(gradient) else gradient
