"""What is known of a cast model: by which of its modules the float32 value behind a weight is found.

Every submodule of a cast model has the model's `CastModel` in its ``__dict__``. Because it lies there, ``state_dict``,
``load_state_dict``, deepcopy and pickle of any part of the model find it without knowing of a session. Parameters are found by
themselves and not by name, since pruning and parametrizations move them. The iterators over modules take a fraction of the time
of torch's: every forward asks.
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
    """What was done to the weights of a model; its modules share it.

    ``parameters`` (by id) have float32 values, ``kept`` are float32 themselves. ``loans`` are the session's.
    """

    lower_precision: torch.dtype
    loans: Loans
    parameters: dict[int, Float32Value] = field(default_factory=dict)
    kept: dict[int, nn.Parameter] = field(default_factory=dict)
    was_made_float32: bool = False  # by ``model.float()``
    _cast: list[nn.Parameter] = field(default_factory=list)  # held, so that no other gets the id of one

    def add(self, param: nn.Parameter, entry: Float32Value) -> None:
        """``entry`` is the float32 value of this parameter."""
        self.parameters[id(param)] = entry
        self._cast.append(param)

    def every_cast(self) -> Iterator[tuple[nn.Parameter, Float32Value]]:
        """(parameter, its float32 value) for all that were cast, also those that are in no module any more."""
        return ((param, self.parameters[id(param)]) for param in self._cast)

    def lower_in(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Float32Value]]:
        """(name, lower-precision parameter, its float32 value) for the module's own parameters."""
        for name, param in module._parameters.items():
            if isinstance(param, nn.Parameter) and param.dtype is self.lower_precision:
                if id(param) not in self.parameters:  # new since, and its own value
                    self.add(param, Float32Value(self.loans))
                yield name, param, self.parameters[id(param)]


def record_of(module: nn.Module) -> CastModel | None:
    """What was done to the model that the module is part of, if its weights were cast."""
    return module.__dict__.get(RECORD_KEY)


def lower_entries(model: nn.Module) -> Iterator[tuple[nn.Parameter, Float32Value]]:
    """(lower-precision parameter, its float32 value) for everything in the model that was cast."""
    for module in model.modules():
        record = record_of(module)
        for _, param, entry in record.lower_in(module) if record is not None else ():
            yield param, entry


def walk(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of ``model``, each once, as ``model.modules()`` gives them."""
    seen, pending = {model}, [model]
    for module in pending:
        yield module
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                pending.append(child)


def some_parameter(model: nn.Module) -> nn.Parameter | None:
    """One of the model's parameters, if it has any; ``next(model.parameters())`` costs as much as a small layer."""
    for module in walk(model):
        for param in module._parameters.values():
            if param is not None:
                return param
    return None
