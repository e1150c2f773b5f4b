"""``state_dict`` and ``load_state_dict`` of any part of a cast model, in float32: hooks that go by the module's record."""

from __future__ import annotations

import torch
from torch import nn

from .. import kernels
from ..errors import ConfigurationError
from .copies import RECORD_KEY, hand_out_plain_copies
from .records import WeightRecord
from .stalling import warn_of_loaded_average


def go_by_record(module: nn.Module, record: WeightRecord) -> None:
    """Have what is saved of the module, loaded into it and copied be float32, by this record."""
    module.__dict__[RECORD_KEY] = record
    module.register_state_dict_post_hook(_put_float32_values)
    module.register_load_state_dict_pre_hook(_take_float32_values)
    module.register_load_state_dict_post_hook(_after_load)
    hand_out_plain_copies(module)


def _put_float32_values(module: nn.Module, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    """state_dict() hands out the float32 values themselves, not copies: writing to them is writing to the model."""
    for name, lower, entry in module.__dict__[RECORD_KEY].lower_tensors(module):
        saved = state_dict.get(prefix + name)
        if saved is not None:
            keep_vars = saved is lower and isinstance(entry.value, nn.Parameter)
            state_dict[prefix + name] = entry.value if keep_vars else entry.current(lower)


def _take_float32_values(module: nn.Module, state_dict: dict, prefix: str, metadata: dict, *_: object) -> None:
    """load_state_dict() reaches the float32 values before torch rounds the same numbers into the model."""
    if metadata.get("assign_to_params_buffers"):
        raise ConfigurationError(
            "load_state_dict(assign=True) was called on an initialized model: it would put other tensors in the place of the "
            "weights that masters and optimizer belong to. Leave assign=True out (the values are copied, to the float32 "
            "weights too), or load before initialize()."
        )
    record = module.__dict__[RECORD_KEY]
    for name, tensor, entry in record.lower_tensors(module):
        loaded = state_dict.get(prefix + name)
        if entry.rest is not None:
            entry.synchronize(tensor)  # what was written to a master before is older
            if isinstance(loaded, torch.Tensor) and loaded.shape == tensor.shape and loaded.is_floating_point():
                # A state_dict() of the caller's is not touched: load_state_dict hands on a copy.
                values = loaded.detach().to(tensor.device, torch.float32)
                state_dict[prefix + name], entry.rest.loaded = kernels.split(values, entry.rest.bits.dtype)
        elif entry.value is not None and isinstance(loaded, torch.Tensor) and loaded.shape == entry.value.shape:
            warn_of_loaded_average(record.whole, entry, tensor, loaded, prefix + name)
            entry.synchronize(tensor)  # a state_dict() that was kept holds the values themselves
            with torch.no_grad():
                entry.value.copy_(loaded)
            entry.loaded_over = tensor._version


def _after_load(module: nn.Module, *_: object) -> None:
    """After torch has loaded the weights: what is written to them from now on is newer than what was loaded."""
    for _, tensor, entry in module.__dict__[RECORD_KEY].lower_tensors(module):
        rest = entry.rest
        if rest is None:
            loaded_over, entry.loaded_over = entry.loaded_over, None
            if loaded_over is not None and tensor._version != loaded_over:
                entry.value_version = entry.value._version
                if torch.equal(tensor, entry.value.to(tensor.device, tensor.dtype)):
                    entry.agree(tensor)
            continue
        bits, rest.loaded = rest.loaded, None
        if bits is not None and tensor._version != entry.lower_version:
            rest.start(tensor, bits)  # what is loaded may be written again, by DDP
            entry.agree(tensor)
