"""Saving and loading of float32 values, for evaluation, export and averages, of a model whose optimizer keeps the rests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import kernels
from ..dtypes import LOWER_PRECISION


@torch.no_grad()
def float32_state_dict(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """``model.state_dict()`` with the float32 value of every tensor in lower precision, exact where ``optimizer`` keeps its rest.

    The float32 tensors are copies; all others are the model's own, as in ``state_dict``.
    """
    state: dict[str, Tensor] = {}
    copies: dict[int, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor) or tensor.dtype not in LOWER_PRECISION:
            state[name] = tensor.detach() if isinstance(tensor, Tensor) else tensor
        elif id(tensor) in copies:  # tied
            state[name] = copies[id(tensor)]
        else:
            state[name] = copies[id(tensor)] = kernels.joined(tensor, optimizer.state.get(tensor, {}).get("rest"))
    return state


@torch.no_grad()
def load_float32(model: nn.Module, optimizer: Any, state: dict[str, Any], strict: bool = True) -> Any:
    """``model.load_state_dict(state)`` of float32 values; what parameters in lower precision lack of them becomes rests.

    Returns what ``load_state_dict`` does. Raises RuntimeError for names and shapes that do not fit, as it does.
    """
    result = model.load_state_dict(state, strict=strict)
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in state and id(tensor) in held and tensor.dtype in LOWER_PRECISION:
            if getattr(optimizer, "rests", False):
                value = state[name].detach().to(tensor.device, torch.float32)
                kernels.multi_tensor_split([value], [tensor.detach()], [optimizer.keep_rest(tensor)])
    return result
