"""What is known of a cast model: by which of its modules the float32 value behind a tensor is found.

Every submodule of a cast model carries a `WeightRecord` in its ``__dict__``. Parameters are found by themselves and not by name,
since pruning and parametrizations move them; buffers by name, since modules put other tensors in their places. Because the
record sits on the submodule, ``state_dict``, ``load_state_dict``, deepcopy and pickle of any part of the model find it without
knowing of a session.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from .copies import RECORD_KEY
from .float32_values import Float32Value
from .parts import own_tensors


@dataclass
class Looks:
    """The forwards of a model, and before which of them stalling.py looks for writes that torch does not count."""

    forwards: int = 0
    next_look: int = 2
    in_a_row: int = 0  #: that have found something


@dataclass
class CastModel:
    """What `cast_weights` did to a model as a whole; its modules share it.

    ``parameters`` (by id) have float32 values, ``kept`` are float32 themselves. ``sharded`` says that FSDP2 casts the parameters
    while it gathers them: only buffers were cast here. ``has_masters`` says that what optimizers train has a master. ``averages``
    and ``rounded`` name what was warned of: averages, and weights whose rest was dropped again and again.
    """

    lower_precision: torch.dtype
    sharded: bool = False
    has_masters: bool = True
    parameters: dict[int, Float32Value] = field(default_factory=dict)
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    averages: set[str] = field(default_factory=set)
    rounded: set[str] = field(default_factory=set)
    looks: Looks = field(default_factory=Looks)


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
            found = Float32Value(None)
            found.agree(tensor)
            if is_parameter:
                self.whole.parameters[id(tensor)] = found
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
