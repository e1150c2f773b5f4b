"""Gradient clipping for frameworks that pass the model's parameters: gradients are clipped in float32, as the step uses them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..api import clip_grad_norm_
from ..casting.narrow_gradients import stored_gradient
from ..registry import wrapper_of


def clip_norm(
    optimizers: Sequence[Any], parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Clip the gradients of ``parameters`` by their total norm, and return that norm."""
    chosen = [param for param in parameters if stored_gradient(param) is not None]
    for optimizer in optimizers:
        params = wrapper_of(optimizer).gradients.params
        if {param for param in params if stored_gradient(param) is not None} == set(chosen):
            return clip_grad_norm_(optimizer, max_norm, norm_type)  # inside the step, if the optimizer can do that
    return torch.nn.utils.clip_grad_norm_(updated(optimizers, chosen), max_norm, norm_type)


def updated(optimizers: Sequence[Any], parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return ``parameters`` as a list, after their gradients are unscaled, and widened to float32 where the values are float32."""
    for optimizer in optimizers:
        wrapper = wrapper_of(optimizer)
        wrapper.settle()
        wrapper.gradients.widen()
    return list(parameters)
