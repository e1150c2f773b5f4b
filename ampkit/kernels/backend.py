"""The one place that decides who computes the multi-tensor operators: the compiled kernels or plain torch.

The choice is made once, at import, by AMPKIT_EXTENSION (libraries.py). implementation() tells what was chosen and why. The
operators are called through torch's dispatcher (`through_dispatcher`) or past it (`direct`); reference.py chooses.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch

from ampkit.libraries import BUILD, cuda_is_emulated, load_library, report_broken


@dataclass(frozen=True)
class Implementation:
    """The implementation of the multi-tensor operators in this process, and the reason for it."""

    name: str  #: "extension" or "reference"
    why: str  #: in words, with the import error if there was one
    built_with: str | None = None  #: the torch version whose headers the extension was compiled with
    target: str = "2.10"  #: the oldest torch it runs on
    cpu_capability: str | None = None  #: the instruction set of the CPU kernels
    cuda: bool = False  #: whether the CUDA kernels are loaded
    cuda_why: str = "the extension is not loaded"


_OPERATORS = (
    *(f"multi_tensor_{name}" for name in ("scale", "axpby", "join", "split", "unscale_l2norm", "step")),
    "update_scale",
    "cpu_capability",
)
#: The operators of torch.ops.ampkit by name; each has one overload.
_ops: dict[str, Any] = {}
#: By operator, the indices of the arguments that it writes to.
_written: dict[str, list[int]] = {}
#: By operator, the function that calls the kernel past torch's dispatcher (csrc/direct.h). The function returns NotImplemented,
#: with nothing written, if the dispatcher is needed or the kernel refuses an argument.
direct: dict[str, Callable[..., Any]] = {}


def implementation() -> Implementation:
    """Return the implementation that was chosen when ampkit was imported."""
    return _implementation


def through_dispatcher(op: str, *arguments: Any) -> Any:
    """Call the operator of torch.ops.ampkit, and count its writes for autograd's checks and weight-cast caches."""
    result = _ops[op](*arguments)
    if not torch.compiler.is_compiling():
        for argument in [arguments[i] for i in _written[op] if arguments[i] is not None]:
            torch.autograd.graph.increment_version(argument)
    return result


def _load() -> tuple[str, str]:
    """Load ampkit/_C, which registers schemas and CPU kernels. Returns the torch it was built with, and the instruction set."""
    # By name: `from ampkit import _C` would call a library that was never built a circular import.
    library = importlib.import_module("ampkit._C")
    try:
        _ops.update({name: getattr(torch.ops.ampkit, name).default for name in _OPERATORS})
    except AttributeError as error:
        raise ImportError("ampkit/_C was built from older sources; build it again") from error
    for name, op in _ops.items():
        arguments = enumerate(op._schema.arguments)
        _written[name] = [i for i, arg in arguments if arg.alias_info is not None and arg.alias_info.is_write]
        if not op._schema.returns:  # for torch.compile and fake tensors: there is nothing to say about results
            torch.library.register_fake(f"ampkit::{name}", lambda *args: None)
    torch.library.register_fake("ampkit::multi_tensor_unscale_l2norm", _fake_norms)
    if cuda_is_emulated():  # the CUDA kernels, compiled for the host, take the place of those for the CPU
        _call_directly(importlib.import_module("ampkit_emulated").kernels)
        return library.torch_version, "CUDA's, emulated"
    _call_directly(library)
    return library.torch_version, _ops["cpu_capability"]()


def _fake_norms(inputs, outputs, inv_scale, inv_scale_tensor, per_tensor, found_inf, first_bad):
    each = inputs[0].new_empty(len(inputs) if per_tensor else 0, dtype=torch.float32)
    return inputs[0].new_empty(1, dtype=torch.float32), each


def _load_cuda() -> tuple[bool, str]:
    """Load ampkit/_cuda. Returns whether that was possible, and in words why."""
    if torch.version.cuda is None:
        return False, "this torch was built without CUDA"
    try:
        library = importlib.import_module("ampkit._cuda")
    except ModuleNotFoundError:
        return False, f"the CUDA library was not built: AMPKIT_CUDA=1 {BUILD}"
    except (ImportError, OSError) as error:
        why = f"the CUDA library could not be loaded: {error}"
        report_broken(why, error)
        return False, why
    _call_directly(library)
    return True, f"built with torch {library.torch_version}"


def _call_directly(library: ModuleType) -> None:
    """Let a library of kernels read tensors where Python holds them, if ampkit/_casting, built for one torch, shows where."""
    try:
        access = importlib.import_module("ampkit._casting").tensor_access
    except (ImportError, AttributeError):
        return  # the dispatcher serves every call
    library.use_tensor_access(access)
    for name, written in _written.items():
        if hasattr(library, name):
            method = partial(getattr(library, name), sum(1 << i for i in written))
            direct[name] = partial(_first_of, direct[name], method) if name in direct else method


def _first_of(method: Callable[..., Any], other: Callable[..., Any], *arguments: Any) -> Any:
    result = method(*arguments)
    return other(*arguments) if result is NotImplemented else result


def _choose() -> Implementation:
    loaded, why = load_library("the extension", _load)
    if loaded is None:
        return Implementation("reference", why)
    cuda, cuda_why = _load_cuda()
    return Implementation(
        "extension", why, built_with=loaded[0], cpu_capability=loaded[1], cuda=cuda, cuda_why=cuda_why
    )


_implementation = _choose()
#: The device types that have kernels.
kernel_devices = frozenset(
    ("cpu", "cuda") if _implementation.cuda else ("cpu",) if _implementation.name == "extension" else ()
)
