"""``state_dict`` and ``load_state_dict`` of any part of a cast model, in float32: hooks that go by the module's record."""

from __future__ import annotations

import torch
from torch import nn

from ..errors import ConfigurationError
from .copies import RECORD_KEY, hand_out_plain_copies
from .records import CastModel


def go_by_record(module: nn.Module, record: CastModel) -> None:
    """Have what is saved of the module, loaded into it and copied be float32, by this record."""
    module.__dict__[RECORD_KEY] = record
    module.register_state_dict_post_hook(_lend_float32_values)
    module.register_load_state_dict_pre_hook(_take_float32_values)
    hand_out_plain_copies(module)


def _lend_float32_values(module: nn.Module, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    """state_dict() lends out the float32 values: writing to them is writing to the model, until its next forward or step."""
    record = module.__dict__[RECORD_KEY]
    for name, lower, entry in record.lower_in(module):
        key = prefix + name
        if (saved := state_dict.get(key)) is not None:
            state_dict[key] = record.loans.lend(entry, lower, state_dict, key, as_parameter=saved is lower)


def _take_float32_values(module: nn.Module, state_dict: dict, prefix: str, metadata: dict, *_: object) -> None:
    """load_state_dict() reaches weights and rests before torch loads the same weights once more.

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
