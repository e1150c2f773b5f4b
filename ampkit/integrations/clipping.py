"""Clipping for frameworks that pass the model's parameters: what the optimizer updates in their places is clipped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..api import clip_grad_norm_, master_params
from ..iteration.optimizer_wrapper import wrapper_of


def clip_norm(
    optimizers: Sequence[Any], parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Clip the gradients of ``parameters`` by their norm, which is returned: at O2 and O5 those of their masters."""
    chosen = [param for param in parameters if param.grad is not None]
    for optimizer in optimizers:
        slots = wrapper_of(optimizer).gradients.slots
        if {slot.param for slot in slots if slot.param.grad is not None} == set(chosen):
            return clip_grad_norm_(optimizer, max_norm, norm_type)  # inside the step, where the optimizer does that
    return torch.nn.utils.clip_grad_norm_(updated(optimizers, chosen), max_norm, norm_type)


def updated(optimizers: Sequence[Any], parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What the optimizers update in the places of ``parameters``, with unscaled gradients; in the same order."""
    targets = {}
    for optimizer in optimizers:
        slots = wrapper_of(optimizer).gradients.slots
        if not any(slot.is_split for slot in slots):  # whose masters are lent: the weights' own gradients count
            next(master_params(optimizer), None)  # has all gradients converted
        targets.update({slot.param: slot.target for slot in slots})
    return [targets.get(param, param) for param in parameters]
