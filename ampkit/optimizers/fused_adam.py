"""Adam and AdamW in multi-tensor calls: the twin of ``torch.optim.Adam`` and ``torch.optim.AdamW``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import kernels
from .fused import Batch, FusedOptimizer, refuse_amsgrad
from .moments import Storage
from .scales import Scale

_SETTINGS = ("lr", "betas", "eps", "weight_decay", "bias_correction")


class FusedAdam(FusedOptimizer):
    """AdamW (``adam_w_mode``, the default) or Adam with L2 regularisation, over lists of tensors.

    ``capturable=True`` keeps the learning rate in a tensor beside the parameters. ``torch.amp.GradScaler.step`` then passes its
    scale and its overflow flag to the step instead of reading them.

    ``state_dtype`` ("float32", "bfloat16", "int8") is the precision of the moments: 8, 4 or about 2 bytes for each parameter.
    Checkpoints hold float32. ``rounding="stochastic"`` rounds parameters in bfloat16 up or down at random, so that they are right
    in the mean and small steps are not lost: for training without float32 values (O3). Random numbers depend on ``seed`` and on
    the number of steps, which checkpoints hold.

    Takes floating-point parameters of any shape. Raises RuntimeError for ``amsgrad`` and for
    gradients that are sparse. Raises ValueError for a rate, ``eps`` or decay below 0, for ``betas`` outside of [0, 1), and
    for a ``state_dtype``, ``rounding`` or ``seed`` that does not exist.

    Source: Kingma and Ba, "Adam", ICLR 2015; Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019.
    """

    takes_rests = True

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        state_dtype: str | torch.dtype = "float32",
        rounding: str = "nearest",
        seed: int = 0,
    ) -> None:
        refuse_amsgrad(self, amsgrad)
        self.capturable = capturable
        self.storage = Storage.of(self, state_dtype, rounding, seed)
        defaults = dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, {**defaults, **self.storage.defaults(seed)})
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.set_grad_none = set_grad_none
        if capturable:
            self._step_supports_amp_scaling = True

    @property
    def device_settings(self) -> dict[str, torch.dtype]:
        return {"lr": torch.float32} if self.capturable else {}

    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:
        """One update. torch's GradScaler passes itself where this is ``capturable``."""
        return self.step_under(grad_scaler, closure)

    def update(self, group: dict[str, Any], batch: Batch, step: Scale) -> None:
        kernels.multi_tensor_adam(
            batch.grads,
            batch.params,
            self.moments(batch, "exp_avg"),
            self.moments(batch, "exp_avg_sq"),
            batch.lower,
            step=step,
            decoupled=bool(self.adam_w_mode),
            **{name: group[name] for name in _SETTINGS},
            **batch.factors,
            **self.numbers(group, batch),
        )
