"""``apex.optimizers.fused_novograd``: NovoGrad in multi-tensor calls."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import CheckpointError
from ...optimizers.fused import Batch, FusedOptimizer, refuse_unsupported
from ...optimizers.scales import Scale, moved_to
from .. import amp_C
from ..multi_tensor_steps import multi_tensor_novograd
from .layout import StepsInGroups, gradient_norms
from .subclassing import ForSubclasses

_SETTINGS = ("lr", "betas", "eps", "weight_decay", "bias_correction", "grad_averaging", "norm_type")


class FusedNovoGrad(ForSubclasses, StepsInGroups, FusedOptimizer):
    """Adam whose second moment is one number for each tensor: the running norm of its gradient.

    ``norm_type`` is 2, or 0 for the maximum norm. The running norm starts from the first gradient's, or from 0 with
    ``init_zero``. ``reg_inside_moment`` normalises and decays before the momentum, as the paper does, instead of after.

    Takes floating-point parameters of any shape. Raises RuntimeError for ``amsgrad`` and for another ``norm_type``,
    `CheckpointError` for a state of another kind of norm, and ValueError for settings as `FusedAdam` does.

    Source: Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments", 2019.
    """

    needs_whole_tensors = True
    multi_tensor_novograd = staticmethod(amp_C.multi_tensor_novograd)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        refuse_unsupported(type(self).__name__, amsgrad=amsgrad)
        if norm_type not in (0, 2):
            raise RuntimeError(f"FusedNovoGrad supports norm_type 2 and 0 (the maximum norm), found {norm_type}.")
        adam = dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, adam | dict(grad_averaging=grad_averaging, norm_type=norm_type, init_zero=init_zero))
        self.moment_mode = 0 if reg_inside_moment else 1
        self.set_grad_none = set_grad_none

    def update(self, group: dict[str, Any], batch: Batch, step: Scale) -> None:
        grad_norms = gradient_norms(batch, group["norm_type"])
        norms, before = self._running_norms(group, batch.params, grad_norms)
        multi_tensor_novograd(
            batch.grads,
            batch.params,
            self.moments(batch, "exp_avg"),
            norms,
            batch.lower,
            step=step,
            reg_inside_moment=self.moment_mode == 0,
            grad_norms=grad_norms,
            **{name: group[name] for name in _SETTINGS},
            **batch.factors,
        )
        if batch.found_inf is not None:
            norms = torch.where(moved_to(batch.found_inf, norms.device) != 0, before, norms)
        states = [self.state[param] for param in batch.params]
        for state in states:
            if "exp_avg_sq" not in state:
                state["exp_avg_sq"] = norms.new_empty(())
        # In place: a CUDA graph starts each time from where it wrote.
        torch._foreach_copy_([state["exp_avg_sq"] for state in states], list(norms.unbind()))

    def state_dict(self) -> dict[str, Any]:
        """Return the state with the norms in the group, as in Apex: a tensor for float16 parameters, and one for the others."""
        saved = super().state_dict()
        for group, live in zip(saved["param_groups"], self.param_groups):
            norms: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
            for key, param in zip(group["params"], live["params"]):
                state = saved["state"].get(key)
                if state is not None and "exp_avg_sq" in state:
                    norms[param.dtype is not torch.float16].append(state["exp_avg_sq"])
                    saved["state"][key] = {name: value for name, value in state.items() if name != "exp_avg_sq"}
            if any(norms):
                group["exp_avg_sq"] = [torch.stack(part) if part else torch.zeros(0) for part in norms]
        return saved

    def translated(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Move the norms out of the group, where Apex keeps a tensor for float16 parameters, and one for the others."""
        for group, live in zip(state_dict["param_groups"], self.param_groups):
            norms = group.pop("exp_avg_sq", None) or ()
            is_half = {key: param.dtype is torch.float16 for key, param in zip(group["params"], live["params"])}
            for wants_half, values in zip((True, False), norms):
                keys = [key for key in group["params"] if is_half[key] is wants_half and key in state_dict["state"]]
                if values is not None and len(values) == len(keys):
                    for key, value in zip(keys, values.unbind()):
                        state_dict["state"][key]["exp_avg_sq"] = value.clone()
                elif values is not None and len(values):
                    raise CheckpointError(
                        f"The checkpoint holds the norms of {len(values)} tensors and the moments of {len(keys)}; NovoGrad "
                        "needs both of each. Was it saved with parameters of another dtype?"
                    )
        return super().translated(state_dict)

    def _running_norms(
        self, group: dict[str, Any], params: list[torch.Tensor], fresh: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norms to start from, and the stored ones, which are below 0 before the first step."""
        none_yet = fresh.new_full((), -1.0)
        stored = torch.stack([self.state[param].get("exp_avg_sq", none_yet).to(fresh) for param in params])
        return torch.where(stored < 0, torch.zeros_like(fresh) if group["init_zero"] else fresh, stored), stored
