"""``apex.contrib.optimizers.fused_adam``: the older FusedAdam, whose ``step`` takes gradients, a scale and output parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ....optimizers.fused import StepInputs
from ...optimizers import FusedAdam as _FusedAdam


class FusedAdam(_FusedAdam):
    """Adam with decoupled weight decay, whose ``step`` may be given scaled gradients of any precision.

    ``max_grad_norm`` clips by the norms passed to ``step``, or inside of `FP16_Optimizer` by those of the groups. ``use_mt`` and
    ``amp_scale_adjustment`` chose kernels, and are accepted.
    """

    takes_step_inputs = False

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        use_mt: bool = False,
        amp_scale_adjustment: float = 1.0,
    ) -> None:
        first = (lr, bias_correction, betas, eps, True, weight_decay, amsgrad)
        super().__init__(params, *first, max_grad_norm=max_grad_norm, eps_inside_sqrt=eps_inside_sqrt)

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: float = 1.0,
        grad_norms: Any = None,
        grad_scaler: Any = None,
    ) -> Any:
        """Make one update from ``grads`` / ``scale``, or from the parameters' own gradients; copies go to ``output_params``.

        ``grads`` and ``output_params`` are a list, a list of lists (one a group) or a generator.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads_by_group = _by_group(grads, self.param_groups)
        outputs = _by_group(output_params, self.param_groups)
        norms = grad_norms if isinstance(grad_norms, (list, tuple)) else [grad_norms] * len(self.param_groups)
        for group, gradients, copies, norm in zip(self.param_groups, grads_by_group, outputs, norms):
            self._step_group(group, gradients, copies, scale, norm)
        return loss

    @torch.no_grad()
    def _step_group(self, group: dict[str, Any], gradients: list, copies: list, scale: float, norm: Any) -> None:
        max_norm = group.get("max_grad_norm", 0.0)
        if norm is not None and max_norm > 0:
            scale = scale * max(1.0, (float(norm) / scale + 1e-6) / max_norm)
        before = [param.grad for param in group["params"]]
        try:
            for param, gradient in zip(group["params"], gradients):
                if gradient is not None:
                    param.grad = gradient.to(param.dtype)
            self.inputs = StepInputs(inv_scale=None if scale == 1.0 else 1.0 / scale)
            self.update_group(group)
        finally:
            self.inputs = None
            for param, gradient in zip(group["params"], before):
                param.grad = gradient
        for param, copy in zip(group["params"], copies):
            if copy is not None:
                copy.copy_(param)


def _by_group(values: Any, groups: list[dict[str, Any]]) -> list[list]:
    """The tensors that belong to each group, None where there are none."""
    if values is None:
        return [[None] * len(group["params"]) for group in groups]
    values = list(values)
    if values and isinstance(values[0], (list, tuple)):
        return [list(part) for part in values]
    remaining = iter(values)
    return [[next(remaining, None) for _ in group["params"]] for group in groups]
