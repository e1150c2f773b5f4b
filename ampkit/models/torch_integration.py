"""Patches of torch where it reads or writes weights of an initialized model itself: to save, copy, average or send them.

A weight that is stored in lower precision is saved, copied and pickled in float32, whatever holds it. Ranks have equal rests:
ampkit/NOTES.md says how.
"""

from __future__ import annotations

import inspect
import multiprocessing.context
import weakref
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.parallel.distributed as ddp
from torch import nn
from torch.multiprocessing.reductions import reduce_tensor
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import swa_utils

from ..casting.state import stored
from ..casting.tensors import tensors_in
from ..dtypes import LOWER_PRECISION
from ..errors import ConfigurationError
from ..patching import PatchSet, Reference, SharedPatches
from ..registry import watchers
from .float32_values import members, own_stored_weights, stored_weights, value_of

#: Methods of a process group that write to their first argument, which may be a list of lists. The functions of
#: torch.distributed are not patched: scripts import those by name, and torch.compile knows them by identity.
_WRITING = (
    *("broadcast", "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced", "gather", "scatter"),
    *("alltoall", "alltoall_base", "reduce_scatter_tensor_coalesced", "recv", "recv_anysource"),
)

#: Weights that are stored in lower precision, by the address of their storage at the first collective after a forward. Forwards
#: clear it.
weights_by_address: dict[int, list[Reference]] = {}


def _patch(patches: PatchSet) -> None:
    for owner, name, around in (
        (swa_utils.AveragedModel, "update_parameters", _average),
        (torch, "_foreach_lerp_", _lerp_to_float32_values),
        (nn.Module, "_save_to_state_dict", _save),
        (nn.Module, "_load_from_state_dict", _load),
        (nn.Parameter, "__deepcopy__", _copy_parameter),
        (nn.Parameter, "__reduce_ex__", _pickle_parameter),
        (ParametrizationList, "__init__", _parametrize),
        (ddp, "_sync_module_states", _send_rests),
        *((getattr(torch.distributed, "ProcessGroup", None), name, _run_collective) for name in _WRITING),
    ):
        if hasattr(owner, name):
            patches.put_around(owner, name, around)
    patches.set(ForkingPickler._extra_reducers, nn.Parameter, _pickle_for_process)


#: The patches of sessions that store weights in lower precision.
around_stored_weights = SharedPatches(_patch)


def _save(original: Callable, self: nn.Module, destination: dict, prefix: str, keep_vars: bool) -> None:
    """Put copies of the float32 values into ``state_dict()``, one for tied weights; parameters if ``keep_vars``."""
    original(self, destination, prefix, keep_vars)
    for name, lower, master in own_stored_weights(self):
        key, saved = prefix + name, master.saved[1]()
        if saved is None or destination.get(master.saved[0]) is not saved:
            value = master.current(lower)
            saved = nn.Parameter(value, requires_grad=lower.requires_grad) if keep_vars else value
            master.saved = key, weakref.ref(saved)
        destination[key] = saved


def _load(original: Callable, self: nn.Module, state_dict: dict, prefix: str, metadata: dict, *args: Any) -> None:
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


def _float32_copy(param: nn.Parameter) -> nn.Parameter | None:
    """Return the float32 parameter to copy or pickle for a weight that is stored in lower precision, None for any other."""
    if (master := value_of(param)) is None:
        return None
    return nn.Parameter(master.current(param), param.requires_grad)


def _copy_parameter(original: Callable, self: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    if id(self) not in memo and (plain := _float32_copy(self)) is not None:
        memo[id(self)] = plain
    return original(self, memo)


def _pickle_parameter(original: Callable, self: nn.Parameter, protocol: int) -> Any:
    if (plain := _float32_copy(self)) is None:
        return original(self, protocol)
    plain.__dict__.update(self.__dict__)  # torch pickles attributes, and does not copy them
    return original(plain, protocol)


def _pickle_for_process(param: nn.Parameter) -> Any:
    """Pickle a parameter for another process. While a child is spawned, its shared memory is kept alive until the child has it."""
    plain, popen = _float32_copy(param), multiprocessing.context.get_spawning_popen()
    if plain is not None and popen is not None:
        vars(popen).setdefault("_ampkit_shared", []).append(plain)
    return reduce_tensor(param if plain is None else plain)


def _parametrize(original: Callable, self: Any, modules: Any, weight: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    try:
        original(self, modules, weight, *args, **kwargs)
    except ValueError as error:
        if "dtype" not in str(error) or weight.dtype not in LOWER_PRECISION:
            raise
        raise ConfigurationError(
            f"A parametrization that makes another dtype was registered on a weight that is stored in {weight.dtype}. Register "
            "it before initialize(), name the layer in keep_fp32=, or use O5, where weights are float32."
        ) from error


def _run_collective(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a collective, and clear the rests of the weights in the memory of its first argument."""
    work = original(self, *args, **kwargs)
    for written in tensors_in(*[*args, *kwargs.values()][:1]):
        if not torch._C._has_storage(written):  # a sparse one
            continue
        if not weights_by_address:
            addresses: dict[int, list[Reference]] = {}
            for weight, master in stored.items():
                if master is not None:
                    addresses.setdefault(weight.untyped_storage().data_ptr(), []).append(Reference(weight))
            weights_by_address.update(addresses)  # at once: another thread may look
        place = written.untyped_storage().data_ptr()
        for weight in [ref() for ref in weights_by_address.get(place, ())]:
            if weight is None or weight not in stored or weight.untyped_storage().data_ptr() != place:
                continue
            begin, end = weight.data_ptr(), weight.data_ptr() + weight.nbytes  # both lie without gaps
            if begin < written.data_ptr() + written.nbytes and written.data_ptr() < end:
                stored[weight].clear_rest()
    return work


def _send_rests(original: Callable, *args: Any, **kwargs: Any) -> None:
    original(*args, **kwargs)
    call = inspect.signature(original).bind(*args, **kwargs).arguments
    module, names = call["module"], call["params_and_buffers_to_ignore"]
    ignored = {id(param) for name, param in module.named_parameters() if name in names}
    kept = [(param, master) for param, master in stored_weights(module) if master.rest is not None]
    masters = dict.fromkeys(master for param, master in kept if id(param) not in ignored)
    if not masters:
        return
    rests = [master.rest.flatten().view(torch.uint8) for master in masters]  # not every backend has int16
    torch.distributed._broadcast_coalesced(call["process_group"], rests, call["broadcast_bucket_size"], call["src"])
    for master, rest in zip(masters, rests):
        master.rest.copy_(rest.view(torch.int16).view(master.rest.shape))


def _average(original: Callable, self: Any, model: nn.Module) -> None:
    pairs = [(param, stored.get(param)) for param in model.parameters()]
    values = [param if master is None else master.current(param) for param, master in pairs]
    # The two methods of a model that an average calls.
    original(self, SimpleNamespace(parameters=lambda: iter(values), buffers=model.buffers))


def _lerp_to_float32_values(original: Callable, self: Any, tensors1: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling() and len(self) == len(tensors1):
        values = [stored.get(end) if one.dtype is torch.float32 else None for one, end in zip(self, tensors1)]
        tensors1 = [end if value is None else value.current(end) for end, value in zip(tensors1, values)]
    return original(self, tensors1, *args, **kwargs)


def _export(original: Callable, mod: nn.Module, *args: Any, **kwargs: Any) -> Any:
    initialized = [model for model in mod.modules() if model in watchers] if isinstance(mod, nn.Module) else []
    for model in initialized:
        watchers[model].before_forward(model)
    program = original(mod, *args, **kwargs)
    # `close` makes the parameters of the model float32, in place.
    if any(True for model in initialized for _ in stored_weights(model)):
        copies = {tensor: _copy(tensor) for tensor in program.state_dict.values()}
        program.state_dict.update({name: copies[tensor] for name, tensor in program.state_dict.items()})
    return program


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().clone()
    return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied


exports = SharedPatches(lambda patches: patches.put_around(torch.export, "export", _export))
