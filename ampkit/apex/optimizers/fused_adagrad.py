"""``apex.optimizers.fused_adagrad``: Adagrad in multi-tensor calls, the twin of ``torch.optim.Adagrad``."""

from __future__ import annotations

from typing import Any

from ...optimizers.fused import Batch, FusedOptimizer
from ...optimizers.scales import Scale
from .. import amp_C
from ..multi_tensor_steps import multi_tensor_adagrad
from .subclassing import ForSubclasses


class FusedAdagrad(ForSubclasses, FusedOptimizer):
    """``torch.optim.Adagrad`` over lists of tensors.

    ``adagrad_w_mode=True`` decouples the weight decay from the gradient, as AdamW does. Takes floating-point parameters of any
    shape. Raises RuntimeError for gradients that are sparse, and ValueError for a rate, ``eps`` or decay below 0.

    Source: Duchi, Hazan and Singer, "Adaptive Subgradient Methods", JMLR 2011.
    """

    multi_tensor_adagrad = staticmethod(amp_C.multi_tensor_adagrad)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        # lr_decay has no argument, as in Apex; it may come from a checkpoint of torch's, which also reads it.
        super().__init__(params, dict(lr=lr, eps=eps, weight_decay=weight_decay, lr_decay=0.0))
        self.adagrad_w_mode = 1 if adagrad_w_mode else 0
        self.set_grad_none = set_grad_none

    def update(self, group: dict[str, Any], batch: Batch, step: Scale) -> None:
        lr = group["lr"]
        if group["lr_decay"]:
            lr = lr / (1.0 + (step - 1.0) * group["lr_decay"])
        multi_tensor_adagrad(
            batch.grads,
            batch.params,
            self.moments(batch, "sum"),
            batch.lower,
            lr=lr,
            eps=group["eps"],
            decoupled=bool(self.adagrad_w_mode),
            weight_decay=group["weight_decay"],
            **batch.factors,
        )

    # Apex counts no steps here; lr_decay is 0, so that only the torch twin would ask for them.
    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        states = {key: {"sum": state["sum"]} for key, state in saved["state"].items() if "sum" in state}
        return {**saved, "state": states}
