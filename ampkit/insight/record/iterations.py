"""Where an iteration ends: at the step of the optimizer that steps first, at every level, under torch's GradScaler, and without."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...events import Listener
from ..repeating import unwatched


class Iterations(Listener):
    """Counts steps, skipped ones included. Subclasses replace `before` and `after`.

    ``scales`` are those of the last `scale_loss` block, or step of torch's GradScaler, of each optimizer; ``scale`` is the latest
    of all. ``iterations`` are counted by the optimizer that steps first: ``on_step`` is called after each step, with the number of
    the one that it ends, or None where it ends none.
    """

    def __init__(self, on_step: Callable[[int | None], None]) -> None:
        self.on_step = on_step
        self.begun = 0  # steps of all optimizers
        self.iterations = 0
        self.scale: float | torch.Tensor = 1.0
        self.scales: weakref.WeakKeyDictionary[Any, float | torch.Tensor] = weakref.WeakKeyDictionary()
        self.counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._first: Callable[[], Any] = lambda: None

    def before(self, optimizer: Any) -> None:
        """A step begins."""

    def after(self, optimizer: Any, skipped: bool) -> None:
        """It was taken, or skipped."""

    def step_begins(self, optimizer: Any) -> None:
        self.begun += 1
        self.counts[optimizer] = self.counts.get(optimizer, 0) + 1
        if self._first() is None:
            self._first = weakref.ref(optimizer)
        self.iterations += optimizer is self._first()
        with unwatched(), torch.no_grad():
            self.before(optimizer)

    def step_ends(self, optimizer: Any, skipped: bool) -> None:
        if not self.begun:  # it began before
            return
        with unwatched(), torch.no_grad():
            self.after(optimizer, skipped)
        self.on_step(self.iterations if optimizer is self._first() else None)

    def block_ends(self, optimizers: Sequence[Any], scale: float | torch.Tensor) -> None:
        with unwatched():
            self.scale = scale.clone() if isinstance(scale, torch.Tensor) else scale
        self.scales.update(dict.fromkeys(optimizers, self.scale))
