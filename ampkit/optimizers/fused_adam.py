"""Adam and AdamW in multi-tensor calls: the twins of ``torch.optim.Adam`` and ``torch.optim.AdamW``, and Apex's name for both."""

from __future__ import annotations

from typing import Any

import torch

from .. import kernels
from .fused import Batch, FusedOptimizer, refuse_unsupported, where_true
from .moments import Storage
from .scales import Scale

_SETTINGS = ("lr", "betas", "eps", "weight_decay")


class AdamW(FusedOptimizer):
    """``torch.optim.AdamW``, which trains parameters in bfloat16 and float16 as float32 values: their rests are in its state.

    ``state_dtype`` ("float32", "bfloat16", "int8") is the precision of the moments: 8, 4 or about 2 bytes for each parameter.
    Checkpoints hold float32. ``rests=False`` keeps no rests: parameters in lower precision lose small updates, as in torch.
    ``rounding="stochastic"`` keeps none either, and rounds parameters in bfloat16 up or down at random, so that they are right in
    the mean. Random numbers depend on ``seed`` and on the number of steps, which checkpoints hold.

    ``max_norm`` clips all gradients together by their norm, ``clip_value`` each element. ``step_in_backward=True`` updates each
    parameter while the backward pass runs, and frees its gradient; ``step()`` comes after it all the same. A step whose gradients
    are not finite changes nothing (``skipped_steps``); in a backward pass that is found for each parameter alone.

    ``capturable=True`` keeps the learning rate in a tensor beside the parameters. With it, or ``fused=True``,
    ``torch.amp.GradScaler.step`` passes its scale and its overflow flag to the step instead of reading them. ``foreach`` chooses
    nothing here, and is accepted.

    Takes floating-point parameters of any shape and mix of dtypes. Raises RuntimeError for ``amsgrad``, ``differentiable``, complex
    parameters and gradients that are sparse. Raises ValueError for a rate, ``eps`` or decay below 0, for ``betas`` outside of
    [0, 1), and for a ``state_dtype``, ``rounding`` or ``seed`` that does not exist.

    Source: Kingma and Ba, "Adam", ICLR 2015; Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019.
    """

    takes_rests = True
    judges_gradients = True
    adam_w_mode = 1
    capturable = False

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        bias_correction: bool = True,
        state_dtype: str | torch.dtype = "float32",
        rests: bool = True,
        step_in_backward: bool = False,
        max_norm: float | None = None,
        clip_value: float | None = None,
        rounding: str = "nearest",
        seed: int = 0,
    ) -> None:
        refuse_unsupported(type(self).__name__, amsgrad=amsgrad, differentiable=differentiable)
        self.capturable = capturable
        self.storage = Storage.of(self, state_dtype, rounding, seed)
        self.train_lower_precision(rests, step_in_backward, max_norm, clip_value)
        defaults = dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, {**defaults, **self.storage.defaults(seed), **where_true(maximize=maximize)})
        if capturable or fused:
            self._step_supports_amp_scaling = True

    @property
    def device_settings(self) -> dict[str, torch.dtype]:
        return {"lr": torch.float32} if self.capturable else {}

    def translated(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        state_dict = super().translated(state_dict)
        for group in state_dict["param_groups"] if not isinstance(self, Adam) else ():
            group.pop("decoupled_weight_decay", None)  # as torch.optim.AdamW, it stays what it is
        return state_dict

    def update(self, group: dict[str, Any], batch: Batch, step: Scale) -> None:
        kernels.multi_tensor_adam(
            batch.grads,
            batch.params,
            self.moments(batch, "exp_avg"),
            self.moments(batch, "exp_avg_sq"),
            batch.lower,
            step=step,
            decoupled=bool(group.get("decoupled_weight_decay", self.adam_w_mode)),
            bias_correction=group["bias_correction"],
            **{name: group[name] for name in _SETTINGS},
            **batch.factors,
            **self.storage.numbers(self, group, batch.params),
        )


class Adam(AdamW):
    """``torch.optim.Adam``: `AdamW` with a weight decay that is added to the gradient, 0 by default."""

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        decoupled_weight_decay: bool = False,
        **settings: Any,
    ) -> None:
        self.adam_w_mode = 0
        self.more_defaults = where_true(decoupled_weight_decay=decoupled_weight_decay)
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **settings)


class FusedAdam(AdamW):
    """`AdamW` under Apex's name, with Apex's arguments and defaults; `Adam` where ``adam_w_mode`` is False.

    ``set_grad_none=False`` has ``zero_grad`` write zeros. ``settings`` are the keywords of `AdamW`.
    """

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
        **settings: Any,
    ) -> None:
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.set_grad_none = set_grad_none
        settings.update(bias_correction=bias_correction, capturable=capturable)
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **settings)
