"""What torch.distributed writes into a cast model, which torch does not count.

A collective may write to a weight (``dist.broadcast(p.data, 0)``) or to a master (``dist.all_reduce(master)``): whichever it
was, the other follows before the next forward or step, as after writes that torch counts. DistributedDataParallel gives every
process the weights of one when it is made, and at the end of ``join()``; the float32 values behind them go with them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
import torch.nn.parallel.distributed as ddp
from torch import nn

from ..patching import PatchSet, SharedPatches
from .float32_values import note_uncounted_write
from .records import lower_entries

#: Methods of a process group that write to what they are given first, which may be lists of lists. Not torch.distributed's
#: functions: scripts import those by name, and torch.compile knows them by identity.
_WRITING = (
    *("broadcast", "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced", "gather", "scatter"),
    *("alltoall", "alltoall_base", "reduce_scatter_tensor_coalesced", "recv", "recv_anysource"),
)


def _patch(patches: PatchSet) -> None:
    if not torch.distributed.is_available():
        return
    group = torch.distributed.ProcessGroup
    for name in _WRITING:
        if hasattr(group, name):
            patches.set(group, name, _noting_writes(getattr(group, name)))
    if hasattr(ddp, "_sync_module_states"):
        patches.set(ddp, "_sync_module_states", _with_float32_values(ddp._sync_module_states))


collectives = SharedPatches(_patch)


def _noting_writes(original: Callable) -> Callable:
    @functools.wraps(original)
    def collective(self: Any, *args: Any, **kwargs: Any) -> Any:
        work = original(self, *args, **kwargs)
        _note(args[0] if args else next(iter(kwargs.values()), None))
        return work

    return collective


def _note(written: Any) -> None:
    if isinstance(written, torch.Tensor):
        note_uncounted_write(written)
    elif isinstance(written, (list, tuple)):
        for part in written:
            _note(part)


def _with_float32_values(original: Callable) -> Callable:
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
        named = chain(module.named_parameters(), module.named_buffers())
        ignored = {id(tensor) for name, tensor in named if name in params_and_buffers_to_ignore}
        entries = {
            id(entry): (tensor, entry)
            for tensor, entry in lower_entries(module)
            if id(tensor) not in ignored and (broadcast_buffers or isinstance(tensor, nn.Parameter))
        }
        held = [pair for pair in entries.values() if pair[1].value is not None or pair[1].rest is not None]
        if not held:
            return
        with torch.no_grad():
            values = [entry.current(tensor) for tensor, entry in held]
            torch.distributed._broadcast_coalesced(process_group, values, broadcast_bucket_size, src)
            for (tensor, entry), value in zip(held, values):
                entry.put(tensor, value)

    return sync_module_states
