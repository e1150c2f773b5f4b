"""LAMB in multi-tensor calls (You et al., "Large Batch Optimization for Deep Learning", ICLR 2020)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import kernels
from ..dtypes import LOWER_PRECISION
from .fused import Batch, FusedOptimizer, refuse_amsgrad
from .scales import Scale, on

_SETTINGS = ("lr", "betas", "eps", "weight_decay", "bias_correction", "grad_averaging")


class FusedLAMB(FusedOptimizer):
    """LAMB: Adam's direction, with a step as long as the weights' norm times the learning rate.

    Takes floating-point parameters of any shape. Gradients of all groups together are clipped to ``max_grad_norm`` first.
    Parameters of groups without weight decay move as in Adam, unless ``use_nvlamb``. Norms are float32, whatever the parameters'
    dtype.

    Raises RuntimeError for ``amsgrad``, and ValueError for settings as `FusedAdam` does.

    Source: You et al., "Large Batch Optimization for Deep Learning", ICLR 2020, algorithm 2.
    """

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
        refuse_amsgrad(self, amsgrad)
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
            own = kernels.clip_factor(norm, group["max_grad_norm"])
            factors["clip"] = own if batch.clip is None else own * on(batch.clip, own.device)
        kernels.multi_tensor_lamb(
            batch.grads,
            batch.targets,
            self.moments(batch, "exp_avg"),
            self.moments(batch, "exp_avg_sq"),
            batch.lower,
            step=step,
            decoupled=bool(self.adam_w_mode),
            trusts=bool(self.use_nvlamb or group["weight_decay"]),
            **{name: group[name] for name in _SETTINGS},
            **factors,
        )


class FusedMixedPrecisionLamb(FusedLAMB):
    """`FusedLAMB` that owns float32 copies of lower-precision parameters, with rate and step count in tensors.

    ``reduced_precision_dtype`` names the parameters' lower precision; by default every float16 or bfloat16 parameter gets
    a copy. Works inside ``torch.amp.GradScaler.step``. Raises what `FusedLAMB` raises.
    """

    _step_supports_amp_scaling = True
    takes_step_inputs = False  # it writes the parameters itself

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        step: int | torch.Tensor = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        self.more_defaults = {"step": step}
        first = (lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode, grad_averaging)
        super().__init__(params, *first, max_grad_norm=max_grad_norm, use_nvlamb=use_nvlamb)
        for group in self.param_groups:
            group["lr"], group["step"] = group["lr"].clone(), group["step"].clone()  # each group its own
        self.reduced_precision_dtype = reduced_precision_dtype

    @property
    def param_groups_full_precision(self) -> list[dict[str, Any]]:
        """The float32 copies of lower-precision parameters, None for the others, group by group."""
        return [
            {**group, "params": [self.state.get(p, {}).get("master_param") for p in group["params"]]}
            for group in self.param_groups
        ]

    @property
    def device_settings(self) -> dict[str, torch.dtype]:
        return {"lr": torch.float32, "step": torch.int32}

    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:
        """One update; inside ``GradScaler.step`` gradients are unscaled here, and an overflow skips the step."""
        return self.step_under(grad_scaler, closure)

    def counted(self, group: dict[str, Any], batches: list[Batch]) -> Iterator[tuple[Scale, Batch]]:
        one_more = on(batches[0].one_more(), group["step"].device)
        group["step"] += one_more.to(group["step"].dtype) if isinstance(one_more, torch.Tensor) else 1
        for batch in batches:
            yield group["step"], batch

    def batches(self, group: dict[str, Any]) -> list[Batch]:
        batches = super().batches(group)
        return [part for batch in batches for part in batch.apart([self._master_of(param) for param in batch.params])]

    def translated(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        # The step stands in the group here, as in Apex.
        return self.with_our_groups(state_dict)

    def _master_of(self, param: torch.Tensor) -> torch.Tensor | None:
        reduced = self.reduced_precision_dtype
        if param.dtype is not reduced and (reduced is not None or param.dtype not in LOWER_PRECISION):
            return None
        state: dict[str, torch.Tensor] = self.state[param]
        if "master_param" not in state:
            state["master_param"] = param.detach().clone().float()
        return state["master_param"]
