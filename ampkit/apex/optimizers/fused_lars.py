"""``apex.optimizers.fused_lars``: LARS in multi-tensor calls."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import required

from ...optimizers.fused import Batch
from .. import amp_C
from ..multi_tensor_steps import tensor_norms
from .fused_sgd import FusedSGD
from .layout import gradient_norms


class FusedLARS(FusedSGD):
    """SGD with a learning rate for each tensor: ``lr * trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)``.

    Groups with ``is_skipped=True`` move as in plain SGD; norms and biases are usually among them. Raises ValueError as `FusedSGD`
    does.

    Source: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks", 2017.
    """

    takes_complex = False
    takes_rests = False  # it needs the norms of float32 parameters
    needs_whole_tensors = True

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
        self.more_defaults = dict(trust_coefficient=trust_coefficient, eps=eps, is_skipped=False)
        more = (nesterov, wd_after_momentum, materialize_master_grads, set_grad_none)
        super().__init__(params, lr, momentum, dampening, weight_decay, *more)

    def trust(self, group: dict[str, Any], batch: Batch) -> torch.Tensor | None:
        if group["is_skipped"]:
            return None
        return amp_C.lars_trust(
            gradient_norms(batch),
            tensor_norms(batch.params),
            *(group[name] for name in ("trust_coefficient", "eps", "weight_decay")),
        )
