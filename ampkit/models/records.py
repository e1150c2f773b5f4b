"""How the modules of a cast model save, load and take over the float32 values of their weights.

A value is found by its weight (`stored`) and not by a name, and every module has the `Loans` of its session in its ``__dict__``, so
that no session has to be known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from ..casting.state import stored
from ..errors import ConfigurationError
from ..patching import Reference
from .copies import hand_out_plain_copies
from .float32_values import LOANS_KEY, Float32Value, Loans, lower_in


class LeftAs(NamedTuple):
    """A parameter, the dtype that `initialize` left it in, and its float32 value, if it is stored in lower precision."""

    param: Reference
    dtype: torch.dtype
    entry: Float32Value | None


def parameters_now(model: nn.Module) -> list[LeftAs]:
    """The model's parameters as they are now, without those that stay as they came beside stored ones."""
    every = [param for param in model.parameters() if param not in stored or stored[param] is not None]
    return [LeftAs(Reference(param), param.dtype, stored.get(param)) for param in every]


def go_by_values(module: nn.Module, loans: Loans) -> None:
    """Have what is saved of the module, loaded into it and copied be float32."""
    module.__dict__[LOANS_KEY] = loans
    loans.modules.add(module)
    module.register_state_dict_post_hook(_save_float32_values)
    module.register_load_state_dict_pre_hook(_take_float32_values)
    hand_out_plain_copies(module)


def _save_float32_values(module: nn.Module, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    """state_dict() has copies of the float32 values; as parameters with ``keep_vars=True``."""
    for name, lower, entry in lower_in(module):
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
    for name, tensor, entry in lower_in(module):
        loaded = state_dict.get(prefix + name)
        entry.loans.end(entry)  # what was written to a loan before is older
        if not isinstance(loaded, torch.Tensor) or loaded.shape != tensor.shape or not loaded.is_floating_point():
            continue
        if loaded.dtype is not tensor.dtype:
            entry.put(tensor, loaded)
            # A state_dict() of the caller's is not touched: load_state_dict hands on a copy.
            state_dict[prefix + name] = tensor.detach()


def sync_weights(model: nn.Module, left_as: Sequence[LeftAs]) -> bool:
    """Have what was written to loans, and float32 values that were assigned to weights (``p.data = values``), reach the weights.

    Returns whether values were assigned. Raises `ConfigurationError` for parameters whose dtype was changed, by name.
    """
    if (loans := model.__dict__.get(LOANS_KEY)) is not None:
        loans.end()
        loans.lend_again()
    assigned, changed = [], []
    for ref, dtype, entry in left_as:
        if (param := ref()) is None:
            continue
        if param.dtype is not dtype:
            is_value = entry is not None and param.dtype is torch.float32 and not entry.was_made_float32
            (assigned if is_value else changed).append((param, dtype, entry))
        elif entry is not None and (rest := entry.rest) is not None:
            # Not entry.move_rest_beside(param), which every weight would be asked for in every forward.
            if rest.numel() != param.numel() or rest.device != param.device:
                entry.move_rest_beside(param)
    names = {param: name for name, param in model.named_parameters()} if changed else {}
    for param, dtype, _ in changed:
        if param in names:
            raise ConfigurationError(
                f"{names[param]!r} is {param.dtype}, initialize() left it {dtype}. Do not change the dtype of an initialized model "
                "(.half(), .float(), .to(dtype)): call ampkit.close() first, or initialize again with another level."
            )
    for param, _, entry in assigned:
        entry.take_float32(param)
    return bool(assigned)


def _join(whole: nn.Module, _: str, part: nn.Module | None) -> None:
    """Have modules that become part of an initialized model, such as parametrizations, save what came from it in float32."""
    loans = whole.__dict__.get(LOANS_KEY)
    if loans is None or part is None:
        return
    for module in part.modules():
        if LOANS_KEY not in module.__dict__ and not isinstance(module, torch.jit.ScriptModule):
            go_by_values(module, loans)


register_module_module_registration_hook(_join)
