"""LARS in multi-tensor calls (You et al., "Large Batch Training of Convolutional Networks", 2017)."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import required

from .. import kernels
from .fused import Batch, FusedOptimizer
from .fused_sgd import refuse_negative, refuse_odd_nesterov, step_with_momentum


class FusedLARS(FusedOptimizer):
    """SGD with a learning rate for each tensor: ``lr * trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)``.

    Groups with ``is_skipped=True`` move as in plain SGD; norms and biases are usually among them. Raises ValueError as `FusedSGD`
    does.

    Source: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks", 2017.
    """

    counts_steps = False

    def __init__(
        self,
        params: Any,
        lr: Any = required,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        refuse_negative(lr=0.0 if lr is required else lr, momentum=momentum, weight_decay=weight_decay)
        refuse_odd_nesterov(nesterov, momentum, dampening)
        super().__init__(
            params,
            dict(
                lr=lr,
                momentum=momentum,
                dampening=dampening,
                weight_decay=weight_decay,
                trust_coefficient=trust_coefficient,
                eps=eps,
                nesterov=nesterov,
                is_skipped=False,
            ),
        )
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        self.set_grad_none = set_grad_none
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False

    def update(self, group: dict[str, Any], batch: Batch, step: torch.Tensor | None) -> None:
        step_with_momentum(self, group, batch, None if group["is_skipped"] else _trust)


def _trust(group: dict[str, Any], part: Batch) -> torch.Tensor:
    return kernels.lars_trust(
        part.gradient_norms(),
        kernels.gradient_norms(part.targets),
        trust_coefficient=group["trust_coefficient"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
    )
