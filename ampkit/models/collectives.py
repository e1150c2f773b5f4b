"""What torch.distributed writes into a cast model: the ranks are to be equal bit for bit after it, rests too.

A collective that writes to a weight (``dist.broadcast(p.data, 0)``) clears its rest, on the rank that a broadcast comes from too.
DistributedDataParallel gives every process the weights of one when it is made, and at the end of ``join()``: rests go with them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.parallel.distributed as ddp
from torch import nn

from ..patching import PatchSet, SharedPatches
from .float32_values import Float32Value
from .records import lower_entries

#: Methods of a process group that write to what they are given first, which may be lists of lists. Not torch.distributed's
#: functions: scripts import those by name, and torch.compile knows them by identity.
_WRITING = (
    *("broadcast", "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced", "gather", "scatter"),
    *("alltoall", "alltoall_base", "reduce_scatter_tensor_coalesced", "recv", "recv_anysource"),
)

_Lying = dict[int, list[tuple[weakref.ref[torch.Tensor], Float32Value]]]
#: By model: its lower-precision tensors and their float32 values, by the address of their storage.
_weights: weakref.WeakKeyDictionary[nn.Module, _Lying] = weakref.WeakKeyDictionary()


def note_weights(model: nn.Module) -> None:
    """Have the weights of a cast model be found where they lie now."""
    lying: _Lying = {}
    for tensor, entry in lower_entries(model):
        lying.setdefault(tensor.untyped_storage().data_ptr(), []).append((weakref.ref(tensor), entry))
    _weights[model] = lying


def _patch(patches: PatchSet) -> None:
    if not torch.distributed.is_available():
        return
    group = torch.distributed.ProcessGroup
    for name in _WRITING:
        if hasattr(group, name):
            patches.set(group, name, _clearing_rests(getattr(group, name)))
    if hasattr(ddp, "_sync_module_states"):
        patches.set(ddp, "_sync_module_states", _with_rests(ddp._sync_module_states))


collectives = SharedPatches(_patch)


def _clearing_rests(original: Callable) -> Callable:
    @functools.wraps(original)
    def collective(self: Any, *args: Any, **kwargs: Any) -> Any:
        work = original(self, *args, **kwargs)
        _clear_rests(args[0] if args else next(iter(kwargs.values()), None))
        return work

    return collective


def _clear_rests(written: Any) -> None:
    if isinstance(written, (list, tuple)):
        for part in written:
            _clear_rests(part)
    elif isinstance(written, torch.Tensor) and torch._C._has_storage(written):  # sparse ones have none
        place = written.untyped_storage().data_ptr()
        for ref, entry in [one for lying in list(_weights.values()) for one in lying.get(place, ())]:
            weight = ref()
            if weight is not None and weight.untyped_storage().data_ptr() == place and _overlap(weight, written):
                entry.clear_rest()


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage, without gaps, share memory."""
    begin, end = one.data_ptr(), one.data_ptr() + one.nbytes
    return begin < other.data_ptr() + other.nbytes and other.data_ptr() < end


def _with_rests(original: Callable) -> Callable:
    @functools.wraps(original)
    def sync_module_states(
        module: nn.Module,
        process_group: Any,
        broadcast_bucket_size: int,
        src: int,
        params_and_buffers_to_ignore: Any,
        broadcast_buffers: bool = True,
    ) -> None:
        original(module, process_group, broadcast_bucket_size, src, params_and_buffers_to_ignore, broadcast_buffers)
        ignored = {id(param) for name, param in module.named_parameters() if name in params_and_buffers_to_ignore}
        entries = {
            entry: None for param, entry in lower_entries(module) if entry.rest is not None and id(param) not in ignored
        }
        if not entries:
            return
        rests = [entry.rest.flatten().view(torch.uint8) for entry in entries]  # not every backend has int16
        torch.distributed._broadcast_coalesced(process_group, rests, broadcast_bucket_size, src)
        for entry, rest in zip(entries, rests):
            entry.rest.copy_(rest.view(torch.int16).view(entry.rest.shape))

    return sync_module_states
