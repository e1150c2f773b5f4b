"""The lower-precision weights of a model: cast in place when it is initialized, and float32 again when its session closes.

Behind each stands its float32 value (`Float32Value`), which is the master weight where an optimizer owns the parameter.
agreement.py lets edits on either side reach the other.
"""

from __future__ import annotations

import torch
from torch import nn

from ..dtypes import CASTABLE
from .copies import RECORD_KEY, need_no_plain_copies, remove_hooks
from .float32_values import Float32Value
from .keep_fp32 import ACTIVATION_KEY, Kept
from .parts import own_tensors
from .records import CastModel, WeightRecord, lower_entries
from .state_dicts import go_by_record


def cast_weights(
    model: nn.Module,
    lower_precision: torch.dtype,
    kept: Kept,
    shared: dict[torch.Tensor, Float32Value],
    sharded: bool = False,
    has_masters: bool = True,
) -> None:
    """Cast everything that is not kept, in place: parameters stay the same objects and their old storage stays theirs.

    ``shared`` carries the float32 values from model to model of one ``initialize``, so that tied weights share one. Of a
    ``sharded`` model only buffers are cast.
    """
    whole = CastModel(lower_precision, sharded=sharded, has_masters=has_masters)
    for module in model.modules():
        # Scripted modules have no weights here: see validation.py.
        if RECORD_KEY in module.__dict__ or isinstance(module, torch.jit.ScriptModule):
            continue
        record = WeightRecord(whole, in_float32=kept.covers(module))
        go_by_record(module, record)  # first, so that what fails halfway is undone
        for name, tensor in own_tensors(module):
            is_parameter = name in module._parameters
            if tensor.dtype not in CASTABLE or (sharded and is_parameter):  # float64 and complex are never cast
                continue
            if tensor.dtype is torch.float32 and kept.keeps(module, name, tensor, lower_precision):
                whole.kept[id(tensor)] = tensor
                continue
            if tensor not in shared:
                shared[tensor] = _cast(tensor, lower_precision)
            if is_parameter:
                whole.parameters[id(tensor)] = shared[tensor]
            else:
                record.buffers[name] = shared[tensor]
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def _cast(tensor: torch.Tensor, lower_precision: torch.dtype) -> Float32Value:
    """Cast a tensor and its gradient in place; the float32 value is what it was."""
    # .data and not .detach(): the value needs a version counter of its own. float() for weights that came in lower precision.
    entry = Float32Value(tensor.data.float(), gradient=tensor.grad)
    lower = tensor.detach().to(lower_precision)
    lower_gradient = None if entry.gradient is None else entry.gradient.to(lower_precision)
    # All memory is there: what follows does not fail, and is undone as a whole.
    tensor.grad, tensor.data = None, lower
    tensor.grad = lower_gradient
    entry.agree(tensor)
    return entry


def release_originals(
    entries: dict[torch.Tensor, Float32Value], keep: bool, trains_without_master: set[torch.Tensor]
) -> None:
    """After the masters were made: free the float32 values that nobody needs, and move the rest to the host.

    Weights that an optimizer trains without masters (O3) are their own value. The others (frozen or unowned parameters,
    buffers) keep their originals, on the host where they cost no accelerator memory, unless ``keep`` is False.
    """
    # Copies on the host first: when there is no room for one of them, no value is gone yet.
    settled = {
        tensor: None if tensor in trains_without_master or not keep else entry.value.to("cpu")
        for tensor, entry in entries.items()
        if not isinstance(entry.value, nn.Parameter) and entry.rest is None
    }
    for tensor, entry in entries.items():
        entry.gradient = None
        if tensor in settled:
            entry.value, entry.counted = settled[tensor], False
            entry.agree(tensor)


def follow_devices(model: nn.Module) -> None:
    """After ``model.to(device)``: masters and their gradients go where their weights went."""
    for tensor, entry in lower_entries(model):
        if isinstance(entry.value, nn.Parameter):
            entry.value.move_like(tensor)


def restore_weights(model: nn.Module) -> None:
    """Undo `cast_weights`: the same parameter objects, float32, with the values that were behind them, and no hook of ours."""
    for tensor, entry in lower_entries(model):
        value = entry.current(tensor)
        gradient, tensor.grad = tensor.grad, None
        tensor.data = value
        tensor.grad = entry.gradient if gradient is None or entry.gradient is not None else gradient.float()
    for module in model.modules():
        module.__dict__.pop(RECORD_KEY, None)
        module.__dict__.pop(ACTIVATION_KEY, None)
        remove_hooks(module)
        need_no_plain_copies(module)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
