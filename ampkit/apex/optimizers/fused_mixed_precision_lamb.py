"""``apex.optimizers.fused_mixed_precision_lamb``: LAMB with float32 copies of lower-precision parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...dtypes import LOWER_PRECISION
from ...optimizers.fused import Batch
from ...optimizers.scales import Scale, moved_to
from .fused_lamb import LAMB
from .grad_scalers import told_by
from .own_masters import OwnMasters


class FusedMixedPrecisionLamb(OwnMasters, LAMB):
    """A `FusedLAMB` that owns float32 copies of lower-precision parameters, with rate and step count in tensors.

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
        return self.groups_of_masters(lambda param: None)

    @property
    def device_settings(self) -> dict[str, torch.dtype]:
        return {"lr": torch.float32, "step": torch.int32}

    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:
        """Make one update; inside ``GradScaler.step`` gradients are unscaled here, and an overflow skips the step."""
        with told_by(grad_scaler, self):
            return super().step(closure)

    def counted(self, group: dict[str, Any], batches: list[Batch]) -> Iterator[tuple[Scale, Batch]]:
        one_more = moved_to(batches[0].one_more(), group["step"].device)
        group["step"] += one_more.to(group["step"].dtype) if isinstance(one_more, torch.Tensor) else 1
        for batch in batches:
            yield group["step"], batch

    def translated(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        # The step count is in the group here, as in Apex.
        return self.with_our_groups(state_dict)

    def master_of(self, param: torch.Tensor) -> torch.Tensor | None:
        reduced = self.reduced_precision_dtype
        if param.dtype is not reduced and (reduced is not None or param.dtype not in LOWER_PRECISION):
            return None
        if "master_param" not in self.state[param]:
            self.make_master(param)
        return super().master_of(param)
