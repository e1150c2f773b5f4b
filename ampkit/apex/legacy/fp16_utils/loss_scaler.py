"""``apex.fp16_utils.loss_scaler``: the loss scalers of scripts that check and unscale by themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ...kernels import reference


class LossScaler:
    """A static loss scale."""

    def __init__(self, scale: float = 1) -> None:
        self.cur_scale = scale

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """Return False: a static scale checks nothing."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Do nothing: a static scale stays."""

    def scale_gradient(self, module: Any, grad_in: tuple, grad_out: tuple) -> tuple:
        """Multiply gradients by the scale, as a backward hook."""
        return tuple(None if gradient is None else self.loss_scale * gradient for gradient in grad_in)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A loss scale that falls with every overflow, to 1 at least, and grows after ``scale_window`` iterations without."""

    def __init__(self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000) -> None:
        super().__init__(init_scale)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """Whether a gradient of these parameters is not finite."""
        return any(self._has_inf_or_nan(param.grad) for param in params if param.grad is not None)

    @staticmethod
    def _has_inf_or_nan(x: torch.Tensor) -> bool:
        values = x.detach().coalesce()._values() if x.is_sparse else x.detach()
        found_inf = torch.zeros(1, device=values.device)
        reference.report_non_finite([values], found_inf)
        return bool(found_inf.item())

    def update_scale(self, overflow: bool) -> None:
        """End an iteration."""
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1
