"""``apex.amp.opt``: `OptimWrapper`, the optimizer of Apex's first API (``amp.init()``, ``handle.wrap_optimizer``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ... import api
from ...errors import ClosureError


class OptimWrapper:
    """An optimizer whose ``scale_loss(loss)`` takes the losses of an iteration one after the other.

    Each of its ``num_loss`` losses has a dynamic loss scale of its own; an overflow in any of them skips the step.
    """

    def __init__(self, optimizer: Any, amp_handle: Any, num_loss: int, loss_scale: float | str = "dynamic") -> None:
        self._optimizer = optimizer
        self._amp_handle = amp_handle
        self._num_loss = num_loss
        self._loss_idx = 0
        self._anchor: nn.Module | None = None
        if amp_handle.is_active():
            # A session needs a model, and this API was never given one. O0 casts nothing: the handle's patches do.
            self._anchor = nn.Identity()
            api.initialize(
                self._anchor,
                optimizer,
                opt_level="O0",
                cast_model_type=False,
                loss_scale=loss_scale,
                num_losses=num_loss,
                verbosity=0,
                on_floor="warn",
            )

    @contextmanager
    def scale_loss(self, loss: torch.Tensor) -> Iterator[torch.Tensor]:
        """Scale the next loss of this iteration; its gradients are added to those of the losses before."""
        if self._anchor is None or not self._amp_handle.is_active():
            yield loss
            return
        if self._loss_idx >= self._num_loss:
            raise AssertionError(
                f"scale_loss was called {self._loss_idx + 1} times in one iteration of an optimizer wrapped for {self._num_loss} "
                "losses. Pass num_loss= to wrap_optimizer."
            )
        loss_id, self._loss_idx = self._loss_idx, self._loss_idx + 1
        try:
            with api.scale_loss(loss, self._optimizer, loss_id) as scaled:
                yield scaled
        finally:
            self._amp_handle._clear_cache()

    def step(self, closure: Callable | None = None) -> Any:
        if closure is not None:
            raise _NoClosures("The optimizers of amp.init() take no closure. Call it yourself, and step() without it.")
        self.begin_iteration()
        return self._optimizer.step()

    def begin_iteration(self) -> None:
        """Start an iteration: the next loss is the first one again."""
        self._loss_idx = 0

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)


class _NoClosures(ClosureError, NotImplementedError):
    """The error for a closure: Apex raised NotImplementedError here, and RuntimeError elsewhere."""
