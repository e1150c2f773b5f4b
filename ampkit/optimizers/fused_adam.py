"""Adam and AdamW in multi-tensor calls: the twin of ``torch.optim.Adam`` and ``torch.optim.AdamW``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import kernels
from ..dtypes import LOWER_PRECISION
from .fused import Batch, FusedOptimizer, refuse_amsgrad
from .moments import Storage
from .scales import Scale

_SETTINGS = ("lr", "betas", "eps", "weight_decay", "bias_correction")
_REMOVED = ("grads", "output_params", "scale", "grad_norms")


class FusedAdam(FusedOptimizer):
    """AdamW (``adam_w_mode``, the default) or Adam with L2 regularisation, over lists of tensors.

    ``capturable=True`` keeps the learning rate in a tensor beside the parameters. ``torch.amp.GradScaler.step`` then passes its
    scale and its overflow flag to the step instead of reading them. ``master_weights=True``, together with it, updates float32
    copies of lower-precision parameters; `initialize` needs neither.

    ``state_dtype`` ("float32", "bfloat16", "int8") is the precision of the moments: 8, 4 or about 2 bytes for each parameter.
    Checkpoints hold float32. ``rounding="stochastic"`` rounds parameters in bfloat16 up or down at random, so that they are right
    in the mean and small steps are not lost: for training without float32 values (O3). Random numbers depend on ``seed`` and on
    the number of steps, which checkpoints hold.

    Takes floating-point parameters of any shape. Raises RuntimeError for ``amsgrad``, for ``master_weights`` without ``capturable``
    and for gradients that are sparse. Raises ValueError for a rate, ``eps`` or decay below 0, for ``betas`` outside of [0, 1), and
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
        master_weights: bool = False,
        state_dtype: str | torch.dtype = "float32",
        rounding: str = "nearest",
        seed: int = 0,
    ) -> None:
        refuse_amsgrad(self, amsgrad)
        if master_weights and not capturable:
            raise RuntimeError(
                "FusedAdam: master_weights=True requires capturable=True. Set both, or use initialize(), O2."
            )
        self.capturable = capturable
        self.storage = Storage.of(self, state_dtype, rounding, seed)
        defaults = dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, {**defaults, **self.storage.defaults(seed)})
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.set_grad_none = set_grad_none
        self.master_weights = master_weights
        if master_weights:
            self.takes_step_inputs = False  # it writes the parameters itself
        if capturable:
            self._step_supports_amp_scaling = True
        if master_weights:
            self._make_masters()

    @property
    def device_settings(self) -> dict[str, torch.dtype]:
        return {"lr": torch.float32} if self.capturable else {}

    @property
    def param_groups_master(self) -> list[dict[str, Any]]:
        """The float32 copies of lower-precision parameters, group by group."""
        return [
            {**group, "params": [self.state.get(p, {}).get("master_param", p) for p in group["params"]]}
            for group in self.param_groups
        ]

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = None,
        grad_norms: Any = None,
        grad_scaler: Any = None,
    ) -> Any:
        """One update. Of the arguments only ``closure`` and, if capturable, ``grad_scaler`` still mean anything."""
        given = [name for name, value in zip(_REMOVED, (grads, output_params, scale, grad_norms)) if value is not None]
        if given:
            raise RuntimeError(
                f"FusedAdam has been updated. Simply initialize it like torch.optim.AdamW and call step(); {', '.join(given)} "
                "can no longer be passed to it. For mixed precision call initialize(model, optimizer, opt_level='O2')."
            )
        return self.step_under(grad_scaler, closure)

    def batches(self, group: dict[str, Any]) -> list[Batch]:
        batches = super().batches(group)
        if not self.master_weights:
            return batches
        return [part for batch in batches for part in batch.apart(self._masters_of(batch.params))]

    def update(self, group: dict[str, Any], batch: Batch, step: Scale) -> None:
        kernels.multi_tensor_adam(
            batch.grads,
            batch.targets,
            self.moments(batch, "exp_avg"),
            self.moments(batch, "exp_avg_sq"),
            batch.lower,
            step=step,
            decoupled=bool(self.adam_w_mode),
            **{name: group[name] for name in _SETTINGS},
            **batch.factors,
            **self.numbers(group, batch),
        )

    def _masters_of(self, params: list[torch.Tensor]) -> list[torch.Tensor | None]:
        return [self.state[param].get("master_param") for param in params]

    def _make_masters(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.dtype in LOWER_PRECISION:
                    self.state[param]["master_param"] = param.detach().clone().float()
