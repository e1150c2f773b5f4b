"""The agreement of a cast model's weights and the float32 values behind them, before each forward.

Version counters and addresses tell who wrote last. Whatever is new since ``initialize`` is met here too: modules that came from the
model's own parts are taken in, parameters that nobody has cast are refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import torch
from torch import nn

from ..dtypes import CASTABLE
from ..errors import ConfigurationError
from ..logs import logger
from .copies import RECORD_KEY
from .float32_values import Float32Value, write_lower
from .parts import walk
from .records import CastModel, WeightRecord, record_of
from .rests import Rest
from .stalling import look_for_averages, warn_of_average
from .state_dicts import go_by_record


def sync_weights(model: nn.Module) -> None:
    """Let edits on either side reach the other before the next forward, and refuse what cannot be right.

    In-place writes to tensors of ``state_dict()`` (they are the float32 values) reach the model; counted in-place writes
    to the model's weights, and ``p.data = values`` in either precision, reach the float32 values. Raises
    `ConfigurationError` for weights whose dtype was changed and for parameters that are new since ``initialize``, by name.
    """
    stale: list[tuple[Float32Value, torch.Tensor]] = []
    in_float32: list[tuple[Float32Value, torch.Tensor, nn.Module, str]] = []
    for_training = torch.is_grad_enabled()
    for module in walk(model):
        record = module.__dict__.get(RECORD_KEY)
        if record is None:
            record = _record_of_new(model, module)
        parameters, lower_precision = record.whole.parameters, record.whole.lower_precision
        for name, tensor in module._parameters.items():
            if tensor is None:
                continue
            entry = parameters.get(id(tensor))
            if entry is None:
                _accept_unknown(model, module, name, tensor, record)
                continue
            if tensor.dtype is torch.float32:
                in_float32.append((entry, tensor, module, name))
                continue
            if tensor.dtype is not lower_precision:
                raise _foreign_weight(model, module, name, tensor)
            value, rest = entry.value, entry.rest
            if value is None and rest is None:
                continue
            if value is not None and value._version != entry.value_version and value.shape == tensor.shape:
                entry.refuse_two_writers(tensor)
                stale.append((entry, tensor))
            elif (  # not entry.is_unwritten(tensor), without a call for each weight in each forward
                tensor._version != entry.lower_version
                or tensor.data_ptr() != entry.lower_ptr
                or tensor.numel() != entry.lower_size
                or (rest is not None and rest.lender is not None)
            ):
                _take_written(model, record.whole, entry, tensor, for_training)
        if record.buffers:
            stale += _sync_buffers(model, module, record)
    if in_float32:
        _take_float32(model, in_float32, for_training)
    look_for_averages(model)
    if stale:
        write_lower([entry.value for entry, _ in stale], [tensor for _, tensor in stale])
        for entry, tensor in stale:
            entry.agree(tensor)


def _take_written(
    model: nn.Module, whole: CastModel, entry: Float32Value, tensor: torch.Tensor, for_training: bool
) -> None:
    """What was written to a weight reaches its float32 value. Averages, which lose by it, are warned of."""
    if entry.value is not None and not (entry.counted and tensor.requires_grad):
        warn_of_average(model, whole, entry, tensor)
    entry.synchronize(tensor, for_training)
    if entry.rest is not None:
        _warn_of_dropped_rests(model, whole, entry.rest, tensor)


def _sync_buffers(
    model: nn.Module, module: nn.Module, record: WeightRecord
) -> Iterator[tuple[Float32Value, torch.Tensor]]:
    """The same for a module's buffers; yields those whose float32 value was written to."""
    for name, entry in record.buffers.items():
        tensor = module._buffers.get(name)
        if tensor is None or entry.value is None:
            continue
        if entry.value._version != entry.value_version:
            yield entry, tensor
        elif entry.lower is tensor and not entry.is_unwritten(tensor):
            if warn_of_average(model, record.whole, entry, tensor):
                entry.synchronize(tensor)


def _take_float32(
    model: nn.Module, weights: list[tuple[Float32Value, torch.Tensor, nn.Module, str]], for_training: bool
) -> None:
    """Weights that are float32 now were given values (``p.data = ...``), unless ``.float()`` has made all of a module so."""
    precisions = [_whole(model, module).lower_precision for _, _, module, _ in weights]
    if all(
        entry.is_float32_of_itself(one, to)
        and not any(own is not None and own.dtype is to for own in module._parameters.values())
        for (entry, one, module, _), to in zip(weights, precisions)
    ):
        _, tensor, module, name = weights[0]
        raise _foreign_weight(model, module, name, tensor)
    for (entry, tensor, *_), precision in zip(weights, precisions):
        if tensor.dtype is torch.float32:  # of tied weights the first is done
            entry.take_float32(tensor, precision, for_training)


_TOO_OFTEN = 8


def _warn_of_dropped_rests(model: nn.Module, whole: CastModel, rest: Rest, lower: torch.Tensor) -> None:
    """Say it once if a weight whose master is split is written to again and again: it trains in lower precision then."""
    if rest.drops >= _TOO_OFTEN and not whole.rounded:
        name = next(name for name, one in model.named_parameters(remove_duplicate=False) if one is lower)
        whole.rounded.add(name)
        logger.warning(
            "%s was written to in place %d times, and each time the rest of its split master was dropped: its float32 value is "
            "what %s holds. Use initialize(..., master_weights=True), which keeps what a write leaves as it is, or write "
            "through .data.",
            name,
            rest.drops,
            lower.dtype,
        )


def note_new_modules(model: nn.Module) -> None:
    """Have the lower-precision weights of modules that are new since ``initialize`` known before the next forward."""
    for module in walk(model):
        if RECORD_KEY not in module.__dict__:
            with suppress(ConfigurationError):  # the next forward says what is wrong
                _record_of_new(model, module)


def _record_of_new(model: nn.Module, module: nn.Module) -> WeightRecord:
    """The record for a module that is new since ``initialize``, such as a parametrization: it knows what came from the model."""
    record = replace(model.__dict__[RECORD_KEY], buffers={})
    for name, tensor in module._parameters.items():
        if tensor is not None and id(tensor) not in record.whole.parameters:
            _accept_unknown(model, module, name, tensor, record)
    if not isinstance(module, torch.jit.ScriptModule):
        go_by_record(module, record)
    return record


def _accept_unknown(model: nn.Module, module: nn.Module, name: str, tensor: torch.Tensor, record: WeightRecord) -> None:
    """What `cast_weights` has not cast: what is kept, what is never cast, and weights made of cast ones are right."""
    whole = record.whole
    if whole.sharded or type(tensor) is torch.Tensor:  # torch.func.functional_call lends tensors of its own
        return
    was_kept = id(tensor) in whole.kept
    if not was_kept and tensor.dtype not in CASTABLE:
        return
    if tensor.dtype is not (torch.float32 if was_kept or record.in_float32 else whole.lower_precision):
        raise _foreign_weight(model, module, name, tensor)


def _foreign_weight(model: nn.Module, module: nn.Module, name: str, tensor: torch.Tensor) -> ConfigurationError:
    whole = _whole(model, module)
    prefix = next((prefix for prefix, inner in model.named_modules() if inner is module), "")
    full_name = f"{prefix}.{name}" if prefix else name
    if id(tensor) in whole.parameters or id(tensor) in whole.kept:
        was = whole.lower_precision if id(tensor) in whole.parameters else torch.float32
        return ConfigurationError(
            f"{full_name!r} is {tensor.dtype}, initialize() left it {was}. Do not change the dtype of an initialized model "
            "(.half(), .float(), .to(dtype)): call ampkit.close() first, or initialize again with another level."
        )
    return ConfigurationError(
        f"Parameter {full_name!r} ({tensor.dtype}) is new since initialize(): it has no lower-precision copy and no master. "
        "Change the model first, then call initialize() again; it may be called as often as you like."
    )


def _whole(model: nn.Module, module: nn.Module) -> CastModel:
    """What `module` is a part of: it has no record where it is new, and scripted."""
    return (record_of(module) or record_of(model)).whole


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
