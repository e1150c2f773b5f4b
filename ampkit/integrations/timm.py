"""timm's scaler: ``loss_scaler = NativeScaler()`` instead of ``timm.utils.NativeScaler()``, after `ampkit.initialize`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..api import master_params, scale_loss
from . import clipping, framework
from .grad_scaler import from_grad_scaler, to_grad_scaler


class NativeScaler:
    """A loss scaler with timm's interface over `scale_loss`: one call does backward, clipping and step.

    ``need_update=False`` adds a micro-batch. ``state_dict`` has timm's format, so that each reads the checkpoints of the other, and
    holds the newest session's scale. A call raises what `scale_loss` raises.
    """

    state_dict_key = "amp_scaler"

    def __init__(self, device: str | None = None) -> None:
        """Accept timm's ``device``, which is unused."""

    def __call__(
        self,
        loss: torch.Tensor,
        optimizer: Any,
        clip_grad: float | None = None,
        clip_mode: str = "norm",
        parameters: Iterable[torch.Tensor] | None = None,
        create_graph: bool = False,
        need_update: bool = True,
    ) -> None:
        with scale_loss(loss, optimizer) as scaled:
            scaled.backward(create_graph=create_graph)
        if not need_update:
            return
        if clip_grad is not None:
            if parameters is None:
                parameters = list(master_params(optimizer))
            if clip_mode == "norm":
                clipping.clip_norm([optimizer], parameters, clip_grad)
            else:
                utils = framework("timm.utils", install="timm")
                utils.dispatch_clip_grad(clipping.updated([optimizer], parameters), clip_grad, mode=clip_mode)
        optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return to_grad_scaler()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        from_grad_scaler(state_dict)
