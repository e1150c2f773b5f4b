"""Sparse gradients, which no multi-tensor kernel takes: unscaled and added one by one, in float32.

What is more exact beside one of them (`Slot.exact`) is used where its version says that nobody has written to it since.
"""

from __future__ import annotations

import torch

from ..optimizers.scales import Scale, inverse, on
from .found_inf import FoundInf
from .master_weights import Exact, Seen, Slot


def is_sparse(gradient: torch.Tensor) -> bool:
    return gradient.layout is not torch.strided


def values_of(gradient: torch.Tensor) -> torch.Tensor:
    """What a gradient stores: all of it, or the values of a sparse one."""
    return gradient._values() if is_sparse(gradient) else gradient


def unscale_sparse(slot: Slot, gradient: torch.Tensor, inv: Scale, found: FoundInf | None) -> None:
    """``gradient`` * ``inv`` becomes the slot's."""
    # Coalesced in the target's precision: duplicate indices may add up beyond float16's range.
    total = gradient.to(slot.target.dtype).coalesce() * on(inv, gradient.device)
    if found is not None:
        finite = torch.isfinite(total._values()).all()
        found.flag.copy_(torch.maximum(found.flag, on((~finite).to(torch.float32), found.flag.device)))
    _show(slot, total)


def add_sparse(slot: Slot, gradient: torch.Tensor, inv: Scale, found: FoundInf | None) -> None:
    """``gradient`` * ``inv`` is added to the slot's stash. The sum is sparse where both are."""
    stash, slot.stash, before = slot.stash, None, slot.exact
    if before is not None and before.rounded.is_still(stash):
        stash = before.values * on(inverse(before.scale), before.values.device)
    both = is_sparse(stash) and is_sparse(gradient)
    unscale_sparse(slot, gradient if is_sparse(gradient) else gradient.to_sparse(), inv, found)
    fresh = slot.param.grad if slot.exact is None else slot.exact.values
    _show(slot, fresh + stash if both else _dense(fresh).add_(_dense(stash).to(fresh.dtype)))


def _show(slot: Slot, total: torch.Tensor) -> None:
    slot.param.grad = visible = total.to(slot.param.dtype)
    slot.exact = None if slot.master is None else Exact(total, 1.0, Seen.now(visible))


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if is_sparse(gradient) else gradient
