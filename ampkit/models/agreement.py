"""What a forward of an initialized model looks at first: loans end, float32 values that were assigned to weights are split.

What is new since ``initialize`` is met here too: modules that came from the model's own parts are taken in. Changed dtypes are
refused.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn

from ..errors import ConfigurationError
from .copies import RECORD_KEY
from .float32_values import Float32Value
from .records import go_by_record, record_of, walk

#: Parameters of a model whose weights are not cast, and their dtypes.
Dtypes = list[tuple[weakref.ref[nn.Parameter], torch.dtype]]


def sync_weights(model: nn.Module) -> None:
    """Have what was written to loans, and float32 values that were assigned to weights (``p.data = values``), reach the weights.

    Raises `ConfigurationError` for weights whose dtype was changed, by name.
    """
    whole = record_of(model)
    whole.loans.end()
    whole.loans.lend_again()
    note_new_modules(model)
    in_float32: list[tuple[Float32Value, nn.Parameter, torch.dtype]] = []
    for module in walk(model):
        record = module.__dict__.get(RECORD_KEY, whole)  # scripted ones have none
        parameters, kept, lower_precision = record.parameters, record.kept, record.lower_precision
        for param in module._parameters.values():
            if param is None:
                continue
            entry = parameters.get(id(param))
            if entry is None:  # kept in float32; or new since, and calls are cast
                if param.dtype is not torch.float32 and id(param) in kept:
                    raise _changed(model, param, torch.float32)
            elif param.dtype is lower_precision:
                rest = entry.rest
                # Not entry.follow(param), which every weight would be asked for in every forward.
                if rest is not None and (rest.numel() != param.numel() or rest.device != param.device):
                    entry.follow(param)
            elif param.dtype is torch.float32 and not whole.was_made_float32:
                in_float32.append((entry, param, lower_precision))
            else:
                raise _changed(model, param, lower_precision)
    for entry, param, lower_precision in in_float32:
        if param.dtype is torch.float32:  # of tied weights the first is done
            entry.take_float32(param, lower_precision)
    whole.was_made_float32 = False


def note_new_modules(model: nn.Module) -> None:
    """Have modules that are new since ``initialize``, such as parametrizations, save what came from the model in float32."""
    record = record_of(model)
    for module in walk(model) if record is not None else ():
        if RECORD_KEY not in module.__dict__ and not isinstance(module, torch.jit.ScriptModule):
            go_by_record(module, record)


def dtypes_of(model: nn.Module) -> Dtypes:
    """The parameters of a model whose weights are not cast, as they are now."""
    return [(weakref.ref(param), param.dtype) for param in model.parameters()]


def refuse_changed_dtype(model: nn.Module, left_as: Dtypes) -> None:
    """Raise where a parameter has another dtype than `dtypes_of` has found, by its name."""
    for ref, dtype in left_as:
        param = ref()
        if param is not None and param.dtype is not dtype and any(param is one for one in model.parameters()):
            raise _changed(model, param, dtype)


def _changed(model: nn.Module, param: nn.Parameter, was: torch.dtype) -> ConfigurationError:
    name = next(name for name, one in model.named_parameters() if one is param)
    return ConfigurationError(
        f"{name!r} is {param.dtype}, initialize() left it {was}. Do not change the dtype of an initialized model "
        "(.half(), .float(), .to(dtype)): call ampkit.close() first, or initialize again with another level."
    )
