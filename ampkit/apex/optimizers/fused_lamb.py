"""``apex.optimizers.fused_lamb``: LAMB in multi-tensor calls, with the step count in the parameter group."""

from __future__ import annotations

from typing import Any

import torch

from ...optimizers.fused import Batch, FusedOptimizer, refuse_unsupported
from ...optimizers.scales import Scale, moved_to
from .. import amp_C
from ..multi_tensor_steps import clip_factor, multi_tensor_lamb
from .layout import StepsInGroups
from .subclassing import ForSubclasses

_SETTINGS = ("lr", "betas", "eps", "weight_decay", "bias_correction", "grad_averaging")


class LAMB(FusedOptimizer):
    """LAMB: Adam's direction, with a step as long as the weights' norm times the learning rate.

    Takes floating-point parameters of any shape. Gradients of all groups together are clipped to ``max_grad_norm`` first.
    Parameters of groups without weight decay move as in Adam, unless ``use_nvlamb``. Norms are float32, whatever the parameters'
    dtype.

    Raises RuntimeError for ``amsgrad``, and ValueError for settings as `ampkit.optimizers.FusedAdam` does.

    Source: You et al., "Large Batch Optimization for Deep Learning", ICLR 2020, algorithm 2.
    """

    needs_whole_tensors = True
    _global_grad_norm: torch.Tensor | None = None  # of the step that runs

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        refuse_unsupported(type(self).__name__, amsgrad=amsgrad)
        adam = dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, adam | dict(grad_averaging=grad_averaging, max_grad_norm=max_grad_norm))
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.set_grad_none = set_grad_none
        self.use_nvlamb = use_nvlamb

    def update_groups(self) -> None:
        self._global_grad_norm = self.global_norm()
        super().update_groups()

    def update(self, group: dict[str, Any], batch: Batch, step: Scale) -> None:
        factors, norm = batch.factors, self._global_grad_norm
        if norm is not None and group["max_grad_norm"] is not None:
            clip = clip_factor(norm, group["max_grad_norm"])
            factors["clip"] = clip if batch.clip is None else clip * moved_to(batch.clip, clip.device)
        multi_tensor_lamb(
            batch.grads,
            batch.params,
            self.moments(batch, "exp_avg"),
            self.moments(batch, "exp_avg_sq"),
            batch.lower,
            step=step,
            decoupled=bool(self.adam_w_mode),
            trusts=bool(self.use_nvlamb or group["weight_decay"]),
            **{name: group[name] for name in _SETTINGS},
            **factors,
        )


class FusedLAMB(ForSubclasses, StepsInGroups, LAMB):
    __doc__ = LAMB.__doc__

    multi_tensor_l2norm = staticmethod(amp_C.multi_tensor_l2norm)
    multi_tensor_lamb = staticmethod(amp_C.multi_tensor_lamb)
