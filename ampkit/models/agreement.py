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
from .records import record_of, walk
from .state_dicts import go_by_record


def sync_weights(model: nn.Module) -> None:
    """Have what was written to loans, and float32 values that were assigned to weights (``p.data = values``), reach the weights.

    Raises `ConfigurationError` for weights whose dtype was changed, by name.
    """
    whole = record_of(model)
    whole.loans.end()
    whole.loans.lend_again()
    note_new_modules(model)
    in_float32: list[tuple[Float32Value, torch.Tensor, torch.dtype, nn.Module, str]] = []
    for module in walk(model):
        record = module.__dict__.get(RECORD_KEY, whole)
        parameters, kept, lower_precision = record.parameters, record.kept, record.lower_precision
        for name, tensor in module._parameters.items():
            if tensor is None:
                continue
            entry = parameters.get(id(tensor))
            if entry is None:  # kept in float32; or new since, and calls are cast
                if tensor.dtype is not torch.float32 and id(tensor) in kept:
                    raise _foreign_weight(model, module, name, tensor)
            elif tensor.dtype is lower_precision:
                rest = entry.rest
                # Not entry.follow(tensor), which every weight would be asked for in every forward.
                if rest is not None and (rest.numel() != tensor.numel() or rest.device != tensor.device):
                    entry.follow(tensor)
            elif tensor.dtype is torch.float32:
                in_float32.append((entry, tensor, lower_precision, module, name))
            else:
                raise _foreign_weight(model, module, name, tensor)
    for entry, tensor, lower_precision, module, name in in_float32:
        if whole.was_made_float32:
            raise _foreign_weight(model, module, name, tensor)
        if tensor.dtype is torch.float32:  # of tied weights the first is done
            entry.take_float32(tensor, lower_precision)
    whole.was_made_float32 = False


def note_new_modules(model: nn.Module) -> None:
    """Have modules that are new since ``initialize``, such as parametrizations, save what came from the model in float32."""
    record = record_of(model)
    for module in walk(model) if record is not None else ():
        if RECORD_KEY not in module.__dict__ and not isinstance(module, torch.jit.ScriptModule):
            go_by_record(module, record)


def _foreign_weight(model: nn.Module, module: nn.Module, name: str, tensor: torch.Tensor) -> ConfigurationError:
    whole = record_of(module) or record_of(model)  # what is new and scripted has no record
    prefix = next((prefix for prefix, inner in model.named_modules() if inner is module), "")
    full_name = f"{prefix}.{name}" if prefix else name
    was = whole.lower_precision if id(tensor) in whole.parameters else torch.float32
    return ConfigurationError(
        f"{full_name!r} is {tensor.dtype}, initialize() left it {was}. Do not change the dtype of an initialized model "
        "(.half(), .float(), .to(dtype)): call ampkit.close() first, or initialize again with another level."
    )


Dtypes = list[tuple[weakref.ref[nn.Parameter], torch.dtype]]


def dtypes_of(model: nn.Module) -> Dtypes:
    """The parameters of a model whose weights are not cast, and their dtypes."""
    return [(weakref.ref(param), param.dtype) for param in model.parameters()]


def refuse_changed_dtype(model: nn.Module, left_as: Dtypes) -> None:
    """Raise where a parameter has another dtype than `dtypes_of` has found, by its name."""
    changed = ((param, dtype) for ref, dtype in left_as if (param := ref()) is not None and param.dtype is not dtype)
    found, dtype = next(changed, (None, None))
    if found is None:
        return
    name = next((name for name, param in model.named_parameters() if param is found), None)
    if name is None:  # it was taken out of the model
        return
    raise ConfigurationError(
        f"{name!r} is {found.dtype}, initialize() left it {dtype}. Do not change the dtype of an initialized model "
        "(.half(), .to(dtype)): call ampkit.close() first, or initialize again with O2, O3 or O5, which cast it."
    )
