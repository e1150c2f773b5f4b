"""The option ``run --device cpu``: CUDA calls of a script run on the CPU, for a check on a machine without a GPU.

`in_place_of_cuda` patches the functions of ``torch.cuda``, the ``.cuda()`` methods, the tensor types, and wrappers and process
groups that need GPUs. ``torch.device`` cannot be patched: a mode around torch's functions maps devices among their arguments.
A script reads the same as on a GPU: names of types (``torch.cuda.FloatTensor``), ``torch.device("cuda").type``, and ``is_cuda``
and ``device`` of tensors. torch and ampkit themselves read the true values.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..devices import has_instructions_for
from ..logs import is_rank_zero
from ..parallel import SyncBatchNorm
from ..patching import PatchSet
from ..plan import LOWER_PRECISION_VARIABLE
from .variables import variable

_TYPES = [f"{name}Tensor" for name in "Float Double Half BFloat16 Byte Char Short Int Long Bool".split()]


@contextmanager
def in_place_of_cuda(silent: bool = False) -> Iterator[None]:
    """Replace CUDA by the CPU inside the block, and print a line on standard error. The lower precision defaults to bfloat16."""
    precision = os.environ.get(LOWER_PRECISION_VARIABLE) or "bfloat16"
    if not silent and is_rank_zero():
        slow = f" This processor has no instructions for {precision}: it takes ten to a hundred times as long as float32 (O0)."
        print(
            "ampkit: --device cpu: CUDA calls of this script run on the CPU. The lower precision of amp is "
            f"{precision} there: {LOWER_PRECISION_VARIABLE}=float16 or bfloat16 in the environment chooses. What the script makes "
            "float16 itself, by .half(), stays float16. It trains, saves and resumes as on a GPU, but not as fast."
            f"{'' if has_instructions_for(getattr(torch, precision, torch.bfloat16)) else slow}",
            file=sys.stderr,
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # It builds tables of torch's functions, before they are patched; every optimizer imports it anyway.
        importlib.import_module("torch._dynamo")
    devices, default_dtype = _DevicesToCPU(), torch.get_default_dtype()
    with variable(LOWER_PRECISION_VARIABLE, precision), ExitStack() as stack:
        patches = PatchSet()
        stack.callback(torch.set_default_dtype, default_dtype)
        stack.callback(patches.restore)
        for owner, name, value in _replacements(devices):
            patches.set(owner, name, value)
        with devices:
            yield


class _DevicesToCPU(TorchFunctionMode):
    """A mode that replaces CUDA devices by the CPU in the arguments of every torch function and tensor method."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:  # scripts read its type; it is mapped where it is used
            return func(*args, **kwargs)
        kwargs = {key: _to_cpu(value, key == "device") for key, value in kwargs.items()}
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return _cuda_name(func(*args))
        return func(*_all_to_cpu(args, 1 if func is torch.Tensor.to else None), **kwargs)


def _to_cpu(value: Any, index_is_device: bool = False) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, str):
        if value == "cuda" or value.startswith("cuda:"):
            return "cpu"
        return value.replace("torch.cuda.", "torch.") if value.startswith("torch.cuda.") else value
    if index_is_device and type(value) is int:
        return "cpu"
    return value


def _all_to_cpu(args: tuple, index_at: int | None) -> Iterator[Any]:
    return (_to_cpu(value, place == index_at) for place, value in enumerate(args))


def _cuda_name(name: Any) -> Any:
    if isinstance(name, str) and name.startswith("torch.") and name.split(".")[-1] in _TYPES and name.count(".") == 1:
        return name.replace("torch.", "torch.cuda.")
    return name


def _replacements(devices: _DevicesToCPU) -> Iterator[tuple[Any, str, Any]]:
    """Yield (object, attribute, replacement) for everything that is patched."""
    yield torch.Tensor, "is_cuda", property(_is_cuda)
    yield torch.Tensor, "device", property(_device)
    yield torch.autograd, "_engine_run_backward", _with_hooks_under(devices, torch.autograd._engine_run_backward)
    for name, value in {**_cuda_functions(), **{name: getattr(torch, name) for name in _TYPES}}.items():
        yield torch.cuda, name, value
    # torch's optimizers ask it for a stream if CUDA is available.
    yield torch.accelerator, "current_accelerator", _constant(None)
    yield torch.accelerator, "is_available", _constant(False)
    packed, storages = nn.utils.rnn.PackedSequence, (torch.UntypedStorage, torch.storage.TypedStorage)
    for owner in (torch.Tensor, nn.Module, packed, *storages):
        yield owner, "cuda", _returns_self
    yield nn.Module, "to", _mapped(nn.Module.to, index_at=1)
    yield torch.Tensor, "pin_memory", _returns_self
    yield torch.Tensor, "record_stream", _constant(None)
    yield torch, "load", _load(torch.load)
    for name in ("set_default_device", "set_default_tensor_type"):
        yield torch, name, _mapped(getattr(torch, name))
    yield torch, "Generator", _Generator
    for module in (nn, nn.modules.batchnorm):  # not nn.modules: there DDP looks up the class that it refuses on the CPU
        yield module, "SyncBatchNorm", _SyncBatchNorm
    yield torch.autocast, "__init__", _mapped(torch.autocast.__init__)
    yield nn.parallel.DistributedDataParallel, "__init__", _ddp_init(nn.parallel.DistributedDataParallel.__init__)
    yield sys.modules["torch.nn.parallel.data_parallel"], "_get_available_device_type", lambda: None
    yield torch.utils.data.DataLoader, "__init__", _unpinned(torch.utils.data.DataLoader.__init__)
    if torch.distributed.is_available():
        for module in (torch.distributed, torch.distributed.distributed_c10d):
            for name in ("init_process_group", "new_group"):
                yield module, name, _on_gloo(getattr(torch.distributed, name))
            yield module, "is_nccl_available", lambda: True


def _asks_for_a_script() -> bool:
    """Whether the code that reads an attribute, two frames up, is neither torch's nor ampkit's."""
    return sys._getframe(2).f_globals.get("__name__", "").partition(".")[0] not in ("torch", "ampkit", "apex")


_is_cuda_in_truth = torch.Tensor.is_cuda.__get__
_device_in_truth = torch.Tensor.device.__get__


def _is_cuda(tensor: torch.Tensor) -> bool:
    return _asks_for_a_script() or _is_cuda_in_truth(tensor)


def _device(tensor: torch.Tensor) -> torch.device:
    device = _device_in_truth(tensor)
    # In a thread where the mode is off, a CUDA device would reach torch.
    if device.type == "cpu" and _asks_for_a_script() and torch._C._len_torch_function_stack():
        return torch.device("cuda", 0)
    return device


def _with_hooks_under(devices: _DevicesToCPU, original: Callable) -> Callable:
    """Wrap autograd's engine to switch the mode on: it is off inside ``Tensor.backward``, but the script's hooks need it."""

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch._C._len_torch_function_stack():
            return original(*args, **kwargs)
        with devices:
            return original(*args, **kwargs)

    return run


class _SyncBatchNorm(SyncBatchNorm):
    """ampkit's SyncBatchNorm under the name of ``torch.nn.SyncBatchNorm``, which is for CUDA alone."""

    convert_sync_batchnorm = classmethod(nn.SyncBatchNorm.convert_sync_batchnorm.__func__)


_SyncBatchNorm.__module__, _SyncBatchNorm.__qualname__ = "torch.nn.modules.batchnorm", "SyncBatchNorm"  # for pickles


def _returns_self(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self


def _mapped(function: Callable, index_at: int | None = None) -> Callable:
    """Wrap ``function``: CUDA devices and types in its arguments are mapped, and an integer at ``index_at`` is a device."""

    @functools.wraps(function)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        kwargs = {key: _to_cpu(value, key == "device") for key, value in kwargs.items()}
        return function(*_all_to_cpu(args, index_at), **kwargs)

    return mapped


def _load(original: Callable) -> Callable:
    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not callable(map_location):  # tensors saved on a GPU are loaded to the CPU, whatever the script asks for
            map_location = "cpu"
        return original(f, map_location, *args, **kwargs)

    return load


def _ddp_init(original: Callable) -> Callable:
    @functools.wraps(original)
    def init(
        self: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        original(self, module, None, None, *args, **kwargs)

    return init


def _unpinned(original: Callable) -> Callable:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("pin_memory_device", None)
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        original(self, *args, **kwargs)

    return init


def _on_gloo(original: Callable) -> Callable:
    @functools.wraps(original)
    def on_gloo(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        if isinstance(kwargs.get("backend"), str) and "nccl" in kwargs["backend"].lower():
            kwargs["backend"] = "gloo"
        args = tuple("gloo" if isinstance(value, str) and "nccl" in value.lower() else value for value in args)
        return original(*args, **kwargs)

    return on_gloo


class _Generator(torch.Generator):
    """A ``torch.Generator`` on the CPU, whatever device is named."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, _to_cpu(device, index_is_device=True))


def _constant(value: Any) -> Callable:
    def constant(*args: Any, **kwargs: Any) -> Any:
        return value

    return constant


class _Context:
    """A replacement for ``torch.cuda.device`` and ``torch.cuda.stream`` that does nothing, whatever is named."""

    __init__ = __enter__ = __exit__ = _constant(None)


class _Event:
    """A ``torch.cuda.Event`` that reads the clock: work on the CPU is done when the call returns."""

    wait = synchronize = _constant(None)
    query = _constant(True)

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.record()

    def record(self, stream: Any = None) -> None:
        self._time = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return (end._time - self._time) * 1000.0


class _Stream:
    """A ``torch.cuda.Stream`` whose work is always done."""

    cuda_stream = 0
    device = torch.device("cpu")
    __init__ = __exit__ = wait_event = wait_stream = synchronize = _constant(None)
    query = _constant(True)

    def __enter__(self) -> _Stream:
        return self

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event


_PROPERTIES = types.SimpleNamespace(
    name="CPU in place of CUDA", major=8, minor=0, total_memory=16 * 2**30, multi_processor_count=os.cpu_count() or 1
)


def _cuda_functions() -> dict[str, Any]:
    """The functions of torch.cuda that scripts call, by name."""
    no_effect = (
        "set_device synchronize empty_cache ipc_collect init reset_peak_memory_stats reset_max_memory_allocated "
        "reset_max_memory_cached reset_accumulated_memory_stats set_per_process_memory_fraction manual_seed manual_seed_all "
        "seed seed_all set_rng_state_all set_stream"
    )
    zero = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached max_memory_cached utilization"
    functions = {
        **{name: _constant(None) for name in no_effect.split()},
        **{name: _constant(0) for name in zero.split()},
        "is_available": _constant(True),
        "is_initialized": _constant(False),
        "is_bf16_supported": _constant(True),
        "is_current_stream_capturing": _constant(False),
        "device_count": _constant(1),
        "current_device": _constant(0),
        "get_device_name": _constant(_PROPERTIES.name),
        "get_device_capability": _constant((_PROPERTIES.major, _PROPERTIES.minor)),
        "get_device_properties": _constant(_PROPERTIES),
        "mem_get_info": _constant((_PROPERTIES.total_memory, _PROPERTIES.total_memory)),
        "memory_stats": _constant({}),
        "memory_summary": _constant("no memory of a GPU is in use"),
        "get_rng_state": lambda device="cpu": torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state": lambda state, device="cpu": torch.set_rng_state(state),
        "initial_seed": torch.initial_seed,
        "current_stream": lambda device=None: _Stream(),
        "default_stream": lambda device=None: _Stream(),
        "Stream": _Stream,
        "Event": _Event,
        "stream": _Context,
        "device": _Context,
        "device_of": _Context,
        "nvtx": types.SimpleNamespace(
            range_push=_constant(0), range_pop=_constant(0), mark=_constant(None), range=_Context
        ),
    }
    return {name: value for name, value in functions.items() if hasattr(torch.cuda, name)}
