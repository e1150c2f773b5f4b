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

#: Parameters of a model, and the dtypes that they were left as.
Dtypes = list[tuple[weakref.ref[nn.Parameter], torch.dtype]]


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
                changed.append((weakref.ref(param), lower_precision))
        changed += [(weakref.ref(param), torch.float32) for param in record.kept if param.dtype is not torch.float32]
    if changed:
        refuse_changed_dtype(model, changed)
    for param, entry, lower_precision in assigned:
        entry.take_float32(param, lower_precision)
    whole.was_made_float32 = False
    return bool(assigned)


def note_new_modules(model: nn.Module) -> None:
    """Have modules that are new since ``initialize``, such as parametrizations, save what came from the model in float32."""
    record = record_of(model)
    for module in walk(model) if record is not None else ():
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
