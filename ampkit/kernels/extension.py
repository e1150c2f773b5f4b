"""The operators of torch.ops.ampkit, through torch's dispatcher and past it.

Importing this module loads ampkit/_C, which registers the schemas and the CPU kernels (csrc/registration.cpp), and
raises ImportError where that cannot be done. Who calls them is routing.py.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

# By name: `from ampkit import _C` would call a library that was never built a circular import.
_C = importlib.import_module("ampkit._C")

built_with: str = _C.torch_version
_OPERATORS = (
    *(f"multi_tensor_{name}" for name in ("scale", "axpby", "join", "split", "unscale_l2norm", "step")),
    "update_scale",
    "cpu_capability",
)
try:
    # Each has one overload, which the operator would look for at every call.
    ops = {name: getattr(torch.ops.ampkit, name).default for name in _OPERATORS}
except AttributeError as error:
    raise ImportError("ampkit/_C was built from older sources; build it again") from error

#: Which arguments of an operator are written to.
_WRITTEN = {
    name: [i for i, one in enumerate(op._schema.arguments) if one.alias_info is not None and one.alias_info.is_write]
    for name, op in ops.items()
}
#: By operator, what calls it without the dispatcher (csrc/direct.h). It returns NotImplemented, having done nothing, where the
#: dispatcher is needed.
direct: dict[str, Callable[..., Any]] = {}


def through_dispatcher(op: str, *arguments: Any) -> Any:
    """What the operator returns. Writes are counted: autograd's checks and weight-cast caches read the counts."""
    result = ops[op](*arguments)
    if not torch.compiler.is_compiling():
        for i in _WRITTEN[op]:
            one = arguments[i]
            if one is not None:
                torch._C._increment_version([one] if isinstance(one, torch.Tensor) else list(one))
    return result


def load_cuda_kernels() -> str:
    """Loads ampkit/_cuda, and says which torch it was built with; ImportError where that cannot be done."""
    library = importlib.import_module("ampkit._cuda")
    _give_tensor_access(library)
    return library.torch_version


def load_emulated_kernels() -> None:
    """From here on the CUDA kernels compute on the CPU, as host code: for tests, which have this library on their path."""
    library = importlib.import_module("ampkit_emulated")
    direct.clear()
    _give_tensor_access(library.kernels)


def _give_tensor_access(library: Any) -> None:
    """Lets a library of kernels read tensors where Python holds them, if what was built for this torch says how."""
    try:
        access = importlib.import_module("ampkit._casting").tensor_access
    except (ImportError, AttributeError):
        return  # the dispatcher serves every call
    library.use_tensor_access(access)
    for name, written in _WRITTEN.items():
        if hasattr(library, name):
            method = partial(getattr(library, name), sum(1 << i for i in written))
            direct[name] = partial(_first_of, direct[name], method) if name in direct else method


def _first_of(method: Callable[..., Any], other: Callable[..., Any], *arguments: Any) -> Any:
    result = method(*arguments)
    return other(*arguments) if result is NotImplemented else result


# What torch.compile and fake tensors need to know: operators that only write have nothing to say about results.
for _name, _op in ops.items():
    if not _op._schema.returns:
        torch.library.register_fake(f"ampkit::{_name}", lambda *args: None)


@torch.library.register_fake("ampkit::multi_tensor_unscale_l2norm")
def _fake_norms(inputs, outputs, inv_scale, inv_scale_tensor, per_tensor, found_inf, first_bad):
    each = inputs[0].new_empty(len(inputs) if per_tensor else 0, dtype=torch.float32)
    return inputs[0].new_empty(1, dtype=torch.float32), each


_give_tensor_access(_C)
