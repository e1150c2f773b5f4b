"""Saving, loading and synchronizing the float32 values of weights that are stored in lower precision.

A value is found by its weight (`stored`), not by a name. Nothing is set on a module: torch's own methods are patched for all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ..casting.state import stored
from ..dtypes import LOWER_PRECISION
from ..errors import ConfigurationError
from ..patching import Reference
from .float32_values import Float32Value, Loans, own_stored_weights

#: The modules of models that store weights in lower precision, and the loans of their sessions.
members: weakref.WeakKeyDictionary[nn.Module, Loans] = weakref.WeakKeyDictionary()


class ParameterRecord(NamedTuple):
    """A parameter with the dtype that `initialize` left it in, and its float32 value if it is stored in lower precision."""

    param: Reference
    dtype: torch.dtype
    master: Float32Value | None


def parameters_now(model: nn.Module) -> list[ParameterRecord]:
    """Record the model's present parameters, but for the ones that no optimizer trains where weights are stored."""
    every = [param for param in model.parameters() if param not in stored or stored[param] is not None]
    return [ParameterRecord(Reference(param), param.dtype, stored.get(param)) for param in every]


def save(original: Callable, self: nn.Module, destination: dict, prefix: str, keep_vars: bool) -> None:
    """Put copies of the float32 values into ``state_dict()``; with ``keep_vars=True`` as parameters."""
    original(self, destination, prefix, keep_vars)
    for name, lower, master in own_stored_weights(self):
        key = prefix + name
        destination[key] = master.in_state_dict(lower, destination, key, keep_vars)


def save_past_torch(original: Callable, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Do as `save` for a module whose class overrides torch's ``_save_to_state_dict``."""
    saved = original(self, *args, **kwargs)
    if type(self)._save_to_state_dict is not nn.Module._save_to_state_dict:
        prefix = args[1] if len(args) > 1 else kwargs.get("prefix", "")
        for name, lower, master in own_stored_weights(self):
            value = saved.get(key := prefix + name)
            if isinstance(value, torch.Tensor) and value.dtype is lower.dtype:
                saved[key] = master.in_state_dict(lower, saved, key, isinstance(value, nn.Parameter))
    return saved


def load(original: Callable, self: nn.Module, state_dict: dict, prefix: str, metadata: dict, *args: Any) -> None:
    """Load a ``state_dict()`` into weights and rests.

    Values in lower precision are left to torch: a write like any other, after which a script may restore the old values.
    """
    if metadata.get("assign_to_params_buffers") and self in members:
        raise ConfigurationError(
            "load_state_dict(assign=True) was called on an initialized model: it would put other tensors in the place of the "
            "weights that the optimizer updates. Leave assign=True out (the values are copied, in float32), or load before "
            "initialize()."
        )
    masters = list(own_stored_weights(self))
    for _, _, master in masters:
        master.loans.end(master)  # what was written to a loan before is older
    original(self, state_dict, prefix, metadata, *args)
    for name, tensor, master in masters:
        loaded = state_dict.get(prefix + name)
        if isinstance(loaded, torch.Tensor) and loaded.shape == tensor.shape and loaded.is_floating_point():
            if loaded.dtype is not tensor.dtype:
                master.put(tensor, loaded)


def sync_weights(model: nn.Module, records: Sequence[ParameterRecord]) -> bool:
    """Write a script's changes of loans, and float32 values that it assigned (``p.data = values``), to the weights.

    Returns whether values were assigned. Raises `ConfigurationError` for parameters whose dtype was changed, by name.
    """
    if (loans := members.get(model)) is not None:
        loans.end()
        loans.lend_again()
    assigned, changed = [], []
    for ref, dtype, master in records:
        if (param := ref()) is None:
            continue
        if param.dtype is not dtype:
            is_value = master is not None and param.dtype is torch.float32 and not master.was_made_float32
            (assigned if is_value else changed).append((param, dtype, master))
        elif master is not None and (rest := master.rest) is not None:
            # Not master.move_rest_beside(param), which every weight would be asked for in every forward.
            if rest.numel() != param.numel() or rest.device != param.device:
                master.move_rest_beside(param)
    names = {param: name for name, param in model.named_parameters()} if changed else {}
    for param, dtype, _ in changed:
        if param in names:
            raise ConfigurationError(
                f"{names[param]!r} is {param.dtype}, initialize() left it {dtype}. Do not change the dtype of an initialized model "
                "(.half(), .float(), .to(dtype)): call ampkit.close() first, or initialize again with another level."
            )
    for param, _, master in assigned:
        master.take_float32(param)
    return bool(assigned)


def join(whole: nn.Module, _: str, part: Any) -> None:
    """Register lower-precision parameters that are added to an initialized model, as by a parametrization, with float32 values."""
    loans = members.get(whole) if members else None
    if loans is None:
        return
    for module in part.modules() if isinstance(part, nn.Module) else ():
        if not isinstance(module, torch.jit.ScriptModule):
            members.setdefault(module, loans)
            for name, param in module._parameters.items():
                join(module, name, param)
    if isinstance(part, nn.Parameter) and part.dtype in LOWER_PRECISION:
        stored.setdefault(part, Float32Value(loans, part.dtype))


register_module_module_registration_hook(join)
register_module_parameter_registration_hook(join)
