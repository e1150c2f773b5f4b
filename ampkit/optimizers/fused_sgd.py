"""SGD in multi-tensor calls: the twin of ``torch.optim.SGD``."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import required

from .. import kernels
from .fused import FusedOptimizer, gradients


class FusedSGD(FusedOptimizer):
    """``torch.optim.SGD`` with momentum, over lists of tensors; state loads from and into it.

    ``wd_after_momentum`` adds the weight decay to the update instead of the gradient, so that it stays out of the
    momentum. ``materialize_master_grads`` is kept for Apex's sake: master gradients exist either way.
    """

    def __init__(
        self,
        params: Any,
        lr: Any = required,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        refuse_negative(lr=0.0 if lr is required else lr, momentum=momentum, weight_decay=weight_decay)
        refuse_odd_nesterov(nesterov, momentum, dampening)
        defaults = dict(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov)
        super().__init__(params, defaults)
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        self.set_grad_none = set_grad_none
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False

    def update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        settings = dict(
            lr=group["lr"],
            momentum=group["momentum"],
            dampening=group["dampening"],
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
            wd_after_momentum=self.wd_after_momentum,
        )
        if not group["momentum"]:
            kernels.multi_tensor_sgd(gradients(params), params, None, **settings)
            return
        for first_run, part in split_by_buffer(self, params):
            buffers = self.moments(part, "momentum_buffer")
            kernels.multi_tensor_sgd(gradients(part), part, buffers, first_run=first_run, **settings)


def split_by_buffer(optimizer: FusedOptimizer, params: list[torch.Tensor]) -> list[tuple[bool, list[torch.Tensor]]]:
    """(True, parameters that have no momentum yet) and (False, the others)."""
    first, later = [], []
    for param in params:
        # torch.optim.SGD saves None where it has no momentum.
        if optimizer.state[param].get("momentum_buffer") is None:
            optimizer.state[param].pop("momentum_buffer", None)
            first.append(param)
        else:
            later.append(param)
    return [(is_first, part) for is_first, part in ((True, first), (False, later)) if part]


def refuse_negative(**values: float) -> None:
    for name, value in values.items():
        if value < 0.0:
            raise ValueError(f"Invalid {name}: {value}; expected 0 or more.")


def refuse_odd_nesterov(nesterov: bool, momentum: float, dampening: float) -> None:
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError(
            f"Nesterov momentum requires a momentum and zero dampening; found momentum={momentum}, dampening={dampening}."
        )
