"""A ``torch.amp.GradScaler`` as an argument of ``step``, as Apex's optimizers take it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def told_by(grad_scaler: Any, optimizer: Any) -> Iterator[None]:
    """Set ``grad_scale`` and ``found_inf`` on the optimizer inside of the block, as torch itself does for other optimizers."""
    if grad_scaler is None:
        yield
        return
    state = grad_scaler._per_optimizer_states[id(optimizer)]
    is_unscaled = state["stage"].name == "UNSCALED"
    flag_of_device = state["found_inf_per_device"] if is_unscaled else grad_scaler._check_inf_per_device(optimizer)
    optimizer.grad_scale = None if is_unscaled else grad_scaler._get_scale_async()
    flags = list(flag_of_device.values())
    optimizer.found_inf = torch.stack([flag.to(flags[0].device) for flag in flags]).max().reshape(1) if flags else None
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf
