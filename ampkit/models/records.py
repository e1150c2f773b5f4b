"""What is known of a cast model: by which of its modules the float32 value behind a tensor is found.

Every submodule of a cast model carries a `WeightRecord` in its ``__dict__``. Parameters are found by themselves and not by name,
since pruning and parametrizations move them; buffers by name, since modules put other tensors in their places. Because the
record sits on the submodule, ``state_dict``, ``load_state_dict``, deepcopy and pickle of any part of the model find it without
knowing of a session. The iterators over modules and their tensors take a fraction of the time of torch's: every forward asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from .copies import RECORD_KEY
from .float32_values import Float32Value, Loans


@dataclass
class CastModel:
    """What `cast_weights` did to a model as a whole; its modules share it.

    ``parameters`` (by id) have float32 values, ``kept`` are float32 themselves. ``sharded`` says that FSDP2 casts the parameters
    while it gathers them: only buffers were cast here. ``loans`` are the session's.
    """

    lower_precision: torch.dtype
    loans: Loans
    sharded: bool = False
    parameters: dict[int, Float32Value] = field(default_factory=dict)
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    was_made_float32: bool = False  # by ``model.float()``
    _tensors: list[torch.Tensor] = field(default_factory=list)  # held, so that no other gets the id of one

    def add(self, tensor: torch.Tensor, entry: Float32Value) -> None:
        """``entry`` is the float32 value of this parameter."""
        self.parameters[id(tensor)] = entry
        self._tensors.append(tensor)

    def cast_parameters(self) -> Iterator[tuple[torch.Tensor, Float32Value]]:
        """(parameter, its float32 value) for all that were cast, also those that are in no module any more."""
        return ((tensor, self.parameters[id(tensor)]) for tensor in self._tensors)


@dataclass
class WeightRecord:
    """What `cast_weights` did to one module of a model; ``in_float32`` says that it is kept as a whole."""

    whole: CastModel
    in_float32: bool = False
    buffers: dict[str, Float32Value] = field(default_factory=dict)

    def entry(self, name: str, tensor: torch.Tensor) -> Float32Value:
        """The float32 value of one lower-precision tensor. A new one is its own value: `sync_weights` says which may be new."""
        is_parameter = isinstance(tensor, nn.Parameter)
        found = self.whole.parameters.get(id(tensor)) if is_parameter else self.buffers.get(name)
        if found is None:
            found = Float32Value(self.whole.loans)
            if is_parameter:
                self.whole.add(tensor, found)
            else:
                self.buffers[name] = found
        return found

    def lower_tensors(self, module: nn.Module) -> Iterator[tuple[str, torch.Tensor, Float32Value]]:
        """(name, lower-precision tensor, its float32 value) for the module's own tensors."""
        whole = self.whole
        for name, tensor in own_tensors(module):
            if tensor.dtype is whole.lower_precision and not (whole.sharded and name in module._parameters):
                yield name, tensor, self.entry(name, tensor)


def record_of(module: nn.Module) -> WeightRecord | None:
    """The module's record, if it is part of a cast model."""
    return module.__dict__.get(RECORD_KEY)


def lower_entries(model: nn.Module) -> Iterator[tuple[torch.Tensor, Float32Value]]:
    """(lower-precision tensor, its float32 value) for everything in the model that was cast."""
    for module in model.modules():
        record = record_of(module)
        for _, tensor, entry in record.lower_tensors(module) if record is not None else ():
            yield tensor, entry


def walk(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of ``model``, each once, as ``model.modules()`` gives them."""
    seen, pending = {model}, [model]
    for module in pending:
        yield module
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                pending.append(child)


def own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The module's own parameters and buffers, by name, without what torch.func.functional_call lends it for parameters."""
    for name, tensor in module._parameters.items():
        if isinstance(tensor, nn.Parameter):
            yield name, tensor
    for name, tensor in module._buffers.items():
        if tensor is not None:
            yield name, tensor


def some_parameter(model: nn.Module) -> nn.Parameter | None:
    """One of the model's parameters, if it has any; ``next(model.parameters())`` costs as much as a small layer."""
    for module in walk(model):
        for param in module._parameters.values():
            if param is not None:
                return param
    return None
