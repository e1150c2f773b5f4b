"""Submodules of a cast model that are called on their own: ``model.encoder(x)``, or by ``model.generate(x)``.

Outside of the model's forward nobody has cast their inputs. A hook does, as the model's forward would; inside of a forward it looks
at one attribute and is done. Blocks that repeat (what is in a ModuleList or a Sequential) are called by the module
around them, and have none. torch's layers cast whoever calls them: see layers.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch
from torch import nn

from ..casting.tensors import cast_floating
from ..dtypes import LOWER_PRECISION

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class _Running(threading.local):
    """The dtype to which the innermost running forward of this thread casts its inputs."""

    def __init__(self) -> None:  # dynamo guards on the attribute being there
        self.inputs: torch.dtype | None = None


running = _Running()


def entrances(model: nn.Module) -> list[nn.Module]:
    """The submodules of ``model`` that somebody may call on their own, and that have lower-precision weights."""
    return [module for module in dict.fromkeys(_inside(model)) if precision_in(module) is not None]


def cast_direct_calls(module: nn.Module) -> None:
    """Have the module cast its inputs when it is called outside of any initialized model's forward."""
    if _cast_if_outside not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_cast_if_outside, with_kwargs=True)


def _inside(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, _CONTAINERS):
        return
    for child in module.children():
        # A hook would keep torch's encoder layer from its one kernel; nothing can be put around a script.
        if isinstance(child, (nn.TransformerEncoderLayer, torch.jit.ScriptModule)):
            continue
        if type(child).forward is not nn.Module.forward:
            yield child
        yield from _inside(child)


def _cast_if_outside(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    if running.inputs is not None:
        return None
    dtype = precision_in(module)
    return None if dtype is None else (cast_floating(args, dtype), cast_floating(kwargs, dtype))


def precision_in(module: nn.Module) -> torch.dtype | None:
    """The lower precision of the first parameter inside that has one."""
    for param in module.parameters():
        if param.dtype in LOWER_PRECISION:
            return param.dtype
    return None
