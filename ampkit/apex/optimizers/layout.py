"""Apex's layout of an optimizer's state, where it differs from torch's; norms of gradients, which its rarer optimizers use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ... import kernels
from ...dtypes import CASTABLE
from ...optimizers.fused import Batch
from ...optimizers.scales import moved_to
from ..multi_tensor_steps import tensor_norms


class StepsInGroups:
    """A mixin for Apex's layout, where ``group["step"]`` counts for all parameters of the group."""

    def counted(self, group: dict[str, Any], batches: list[Batch]) -> Iterator[tuple[torch.Tensor | None, Batch]]:
        step = group.get("step", 0)
        if not isinstance(step, torch.Tensor):
            step = group["step"] = torch.full((), float(step), device=batches[0].device)
        step.add_(batches[0].one_more())
        for batch in batches:
            yield step, batch

    def state_dict(self) -> dict[str, Any]:
        """Return the state with step counts as plain integers."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            if "step" in group:
                group["step"] = int(group["step"])
        return saved

    def translated(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Move step counts of the core's layout, which is torch's, to the group."""
        state_dict = super().translated(state_dict)
        for group in state_dict["param_groups"]:
            states = [state_dict["state"][key] for key in group["params"] if key in state_dict["state"]]
            steps = [state.pop("step") for state in states if "step" in state]
            if steps:
                group["step"] = max(int(step) for step in steps)
        return state_dict


def gradient_norms(batch: Batch, norm_type: int = 2) -> torch.Tensor:
    """The norm of each gradient, as it will be used: of order 2, or 0 for the maximum."""
    is_unscaled = norm_type == 2 and all(gradient.dtype in CASTABLE for gradient in batch.grads)
    if is_unscaled:
        _, norms = kernels.multi_tensor_unscale_l2norm(batch.grads, None, batch.inv_scale, per_tensor=True)
    else:
        norms = tensor_norms(batch.grads, norm_type)
    for factor in (None if is_unscaled else batch.inv_scale, batch.clip):
        if factor is not None:
            norms = norms * moved_to(factor, norms.device)
    return norms
