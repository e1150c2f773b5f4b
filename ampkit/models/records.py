"""The record of a cast model, by which any of its modules finds, saves and loads the float32 values of its weights.

Every submodule has the model's `CastModel` in its ``__dict__``, so that no session has to be known. Parameters are found by
themselves and not by name. Before a forward what was written to loans and weights is taken over, and changed dtypes are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from .. import registry
from ..errors import ConfigurationError
from ..patching import Reference
from .copies import RECORD_KEY, hand_out_plain_copies
from .float32_values import Float32Value, Loans

#: Parameters of a model, and the dtypes that they were left as.
Dtypes = list[tuple[Reference, torch.dtype]]


@dataclass
class CastModel:
    """The casts of a model's weights; its modules share it.

    ``parameters`` (by id) have float32 values, ``kept`` are float32 themselves. ``parts`` are the records of models of the same
    session inside of this one. ``loans`` are the session's.
    """

    lower_precision: torch.dtype
    loans: Loans
    parameters: dict[int, Float32Value] = field(default_factory=dict)
    kept: list[nn.Parameter] = field(default_factory=list)
    as_they_came: dict[int, nn.Parameter] = field(default_factory=dict)  # of any dtype
    parts: list[CastModel] = field(default_factory=list)
    was_made_float32: bool = False  # by ``model.float()``
    additions: int = -1  # of modules, when it was last looked for new ones
    #: (parameter, its float32 value) for all that were cast. Held also when they are in no module any more: an id is taken once.
    every_cast: list[tuple[nn.Parameter, Float32Value]] = field(default_factory=list)

    def add(self, param: nn.Parameter, entry: Float32Value) -> None:
        """``entry`` is the float32 value of this parameter."""
        self.parameters[id(param)] = entry
        self.every_cast.append((param, entry))

    def lower_in(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Float32Value]]:
        """(name, lower-precision parameter, its float32 value) for the module's own parameters."""
        for name, param in module._parameters.items():
            is_lower = isinstance(param, nn.Parameter) and param.dtype is self.lower_precision
            if is_lower and id(param) not in self.as_they_came:
                if id(param) not in self.parameters:  # new since, and its own value
                    self.add(param, Float32Value(self.loans))
                yield name, param, self.parameters[id(param)]


def record_of(module: nn.Module) -> CastModel | None:
    """The record of the model that the module is part of, if its weights were cast."""
    return module.__dict__.get(RECORD_KEY)


def lower_entries(model: nn.Module) -> Iterator[tuple[nn.Parameter, Float32Value]]:
    """(lower-precision parameter, its float32 value) for everything in the model that was cast."""
    for module in model.modules():
        record = record_of(module)
        for _, param, entry in record.lower_in(module) if record is not None else ():
            yield param, entry


def go_by_record(module: nn.Module, record: CastModel) -> None:
    """Have what is saved of the module, loaded into it and copied be float32, by this record."""
    module.__dict__[RECORD_KEY] = record
    module.register_state_dict_post_hook(_save_float32_values)
    module.register_load_state_dict_pre_hook(_take_float32_values)
    hand_out_plain_copies(module)


def _save_float32_values(module: nn.Module, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    """state_dict() has copies of the float32 values; as parameters with ``keep_vars=True``."""
    for name, lower, entry in module.__dict__[RECORD_KEY].lower_in(module):
        key = prefix + name
        if (saved := state_dict.get(key)) is not None:
            state_dict[key] = entry.in_state_dict(lower, state_dict, key, as_parameter=saved is lower)


def _take_float32_values(module: nn.Module, state_dict: dict, prefix: str, metadata: dict, *_: object) -> None:
    """load_state_dict() reaches weights and rests; torch then finds each weight's own memory, from which it copies nothing.

    Values in lower precision are left to torch: a write like any other, after which what was there before may be put back.
    """
    if metadata.get("assign_to_params_buffers"):
        raise ConfigurationError(
            "load_state_dict(assign=True) was called on an initialized model: it would put other tensors in the place of the "
            "weights that the optimizer updates. Leave assign=True out (the values are copied, in float32), or load before "
            "initialize()."
        )
    for name, tensor, entry in module.__dict__[RECORD_KEY].lower_in(module):
        loaded = state_dict.get(prefix + name)
        entry.loans.end(entry)  # what was written to a loan before is older
        if not isinstance(loaded, torch.Tensor) or loaded.shape != tensor.shape or not loaded.is_floating_point():
            continue
        if loaded.dtype is not tensor.dtype:
            entry.put(tensor, loaded)
            # A state_dict() of the caller's is not touched: load_state_dict hands on a copy.
            state_dict[prefix + name] = tensor.detach()


def sync_weights(model: nn.Module) -> bool:
    """Have what was written to loans, and float32 values that were assigned to weights (``p.data = values``), reach the weights.

    Returns whether values were assigned. Raises `ConfigurationError` for weights whose dtype was changed, by name.
    """
    whole = record_of(model)
    whole.loans.end()
    whole.loans.lend_again()
    note_new_modules(model)
    assigned: list[tuple[nn.Parameter, Float32Value, torch.dtype]] = []
    changed: Dtypes = []
    for record in (whole, *whole.parts):
        lower_precision = record.lower_precision
        for param, entry in record.every_cast:
            if param.dtype is lower_precision:
                rest = entry.rest
                # Not entry.move_rest_beside(param), which every weight would be asked for in every forward.
                if rest is not None and (rest.numel() != param.numel() or rest.device != param.device):
                    entry.move_rest_beside(param)
            elif param.dtype is torch.float32 and not whole.was_made_float32:
                assigned.append((param, entry, lower_precision))
            else:
                changed.append((Reference(param), lower_precision))
        changed += [(Reference(param), torch.float32) for param in record.kept if param.dtype is not torch.float32]
    if changed:
        refuse_changed_dtype(model, changed)
    for param, entry, lower_precision in assigned:
        entry.take_float32(param, lower_precision)
    whole.was_made_float32 = False
    return bool(assigned)


def note_new_modules(model: nn.Module) -> None:
    """Have modules that are new since ``initialize``, such as parametrizations, save what came from the model in float32."""
    record = record_of(model)
    if record is None or record.additions == registry.additions:
        return
    record.additions = registry.additions
    for module in model.modules():
        if RECORD_KEY not in module.__dict__ and not isinstance(module, torch.jit.ScriptModule):
            go_by_record(module, record)


def refuse_changed_dtype(model: nn.Module, left_as: Dtypes) -> None:
    """Raise where a parameter of the model has another dtype than it was left as, by its name."""
    changed = [(param, dtype) for ref, dtype in left_as if (param := ref()) is not None and param.dtype is not dtype]
    names = {param: name for name, param in model.named_parameters()} if changed else {}
    for param, dtype in changed:
        if param in names:
            raise ConfigurationError(
                f"{names[param]!r} is {param.dtype}, initialize() left it {dtype}. Do not change the dtype of an initialized model "
                "(.half(), .float(), .to(dtype)): call ampkit.close() first, or initialize again with another level."
            )
