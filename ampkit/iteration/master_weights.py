"""Master weights: float32 parameters that take the places of lower-precision ones inside an optimizer.

A `Slot` stands for one parameter of an optimizer: the model's tensor, and its master where it has one. Everything that
handles gradients walks slots and never asks for the opt level.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..models.weights import Float32Value

# Set on a gradient that a master has taken up, to its version at that moment.
COLLECTED = "_ampkit_collected"


# Set on a master that several optimizers update.
_SHARED = "_ampkit_shared"


def is_shared(master: torch.Tensor) -> bool:
    """Whether several optimizers update this master, and look for its gradient there."""
    return hasattr(master, _SHARED)


def mark_collected(gradient: torch.Tensor) -> None:
    """Note on a gradient of the model that the master has it."""
    setattr(gradient, COLLECTED, gradient._version)


class Slot:
    """One parameter: ``param`` is what the model computes with, ``target`` what the optimizer updates."""

    __slots__ = ("aside", "entry", "master", "param")

    def __init__(self, param: torch.Tensor, master: nn.Parameter | None, entry: Float32Value | None) -> None:
        self.param = param
        self.master = master
        self.entry = entry
        self.aside: torch.Tensor | None = None

    @property
    def target(self) -> torch.Tensor:
        return self.param if self.master is None else self.master


def make_slots(group: dict[str, Any], state: dict, values: dict[torch.Tensor, Float32Value]) -> Iterator[Slot]:
    """Put masters into one parameter group of an optimizer, for every parameter that ``values`` knows a float32 value of.

    The optimizer's state moves to the masters as it is: it was float32 and stays so.
    """
    for index, param in enumerate(group["params"]):
        entry = values.get(param)
        if entry is None:
            yield Slot(param, None, None)
            continue
        master = make_master(entry, param)
        group["params"][index] = master
        if param in state:
            state[master] = state.pop(param)
        slot = Slot(param, master, entry)
        if master.grad is not None and param.grad is not None:  # from before initialize
            mark_collected(param.grad)
        yield slot


def make_master(entry: Float32Value, param: torch.Tensor) -> nn.Parameter:
    """The master of a parameter: its float32 value itself, on the parameter's device; shared when it exists already."""
    if not isinstance(entry.value, nn.Parameter):
        value = param.detach().float() if entry.value is None else entry.value.to(param.device)
        entry.value = nn.Parameter(value, requires_grad=param.requires_grad)
        entry.value.grad, entry.gradient = entry.gradient, None
        entry.agree(param)
    else:
        setattr(entry.value, _SHARED, True)
    return entry.value


def put_params_back(group: dict[str, Any], state: dict, param_of: dict[torch.Tensor, torch.Tensor]) -> None:
    """Undo `make_slots` for one parameter group."""
    for index, master in enumerate(group["params"]):
        param = param_of.get(master)
        if param is not None:
            group["params"][index] = param
            if master in state:
                state[param] = state.pop(master)
