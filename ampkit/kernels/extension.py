"""The operators of torch.ops.ampkit, called like the functions in plain torch that define them.

Importing this module loads ampkit/_C, which registers the schemas and the CPU kernels (csrc/registration.cpp), and
raises ImportError where that cannot be done. Lists given to these functions lie on one device and hold float32, float16
and bfloat16 only; routing.py sees to that.
"""

import functools
import importlib
import inspect
from collections.abc import Callable

import torch

from ampkit.kernels.signatures import with_signature_of

# By name: `from ampkit import _C` would call a library that was never built a circular import.
_C = importlib.import_module("ampkit._C")

built_with: str = _C.torch_version
_STEPS = ("sgd", "adam", "adagrad", "lamb", "novograd")
_OPERATORS = (
    *(f"multi_tensor_{name}" for name in ("scale", "axpby", "join", "split", "unscale_l2norm", *_STEPS)),
    "update_scale",
    "cpu_capability",
)
try:
    # Each has one overload, which the operator would look for at every call.
    ops = {name: getattr(torch.ops.ampkit, name).default for name in _OPERATORS}
except AttributeError as error:
    raise ImportError("ampkit/_C was built from older sources; build it again") from error

_direct: list = []  # libraries whose operators are called without the dispatcher
_callers: dict[str, Callable] = {}

# Arguments of operators, and what stands for them. Nothing where a list is scaled in place: each tensor would be handed over twice.
_SPECIAL = {
    "multi_tensor_scale": {"inputs": "[] if not torch.compiler.is_compiling() and inputs is outputs else inputs"},
    "update_scale": {"found_inf": "_beside(found_inf, state)"},
}
_SPECIAL_DIRECTLY = {"multi_tensor_scale": {"inputs": "[] if inputs is outputs else inputs"}}


def kernel(function: Callable) -> Callable:
    """The operator of this name, to be called with the arguments of ``function``."""
    op, written = ops[function.__name__], _written(function.__name__)

    def call(*arguments):
        result = op(*arguments)
        _mark_written(*[arguments[i] for i in written])
        return result

    # By a name of this module, where torch.compile looks.
    _callers[function.__name__] = call
    return with_signature_of(function, f"_callers[{function.__name__!r}]({_given(function, _SPECIAL)})", globals())


def direct_kernel(function: Callable) -> Callable | None:
    """The same past the dispatcher (csrc/direct.h); it answers NotImplemented, having done nothing, where that is needed."""
    name = function.__name__
    mask = sum(1 << i for i in _written(name))
    methods = [functools.partial(getattr(library, name), mask) for library in _direct if hasattr(library, name)]
    if not methods:
        return None
    first, *others = methods

    def call(*arguments):
        result = first(*arguments)
        return others[0](*arguments) if result is NotImplemented else result

    parameters = inspect.signature(function).parameters.values()
    lists = [one.name for one in parameters if one.annotation == "Tensors"]
    condition = f" if {lists[0]} else NotImplemented" if lists else ""  # where nothing lies on any device
    names = {**globals(), "call": call if others else first}
    return with_signature_of(function, f"call({_given(function, _SPECIAL_DIRECTLY)}){condition}", names)


def _written(name: str) -> list[int]:
    """Which arguments of an operator are written to."""
    schema = ops[name]._schema.arguments
    return [i for i, one in enumerate(schema) if one.alias_info is not None and one.alias_info.is_write]


def _given(function: Callable, special: dict[str, dict[str, str]]) -> str:
    """What the operator of this name is given, in terms of the parameters of ``function``.

    Its schema lists the same arguments, flat. What stands for each is an expression (``special``, or `_expression`), and all of
    them are compiled into one call: a loop over the schema would take longer than the work on small tensors.
    """
    parameters = inspect.signature(function).parameters
    schema = ops[function.__name__]._schema.arguments
    names = {one.name for one in schema}
    numbers = {name for name in names if f"{name}_tensor" in names}
    of_operator = special.get(function.__name__, {})
    return ", ".join(of_operator.get(one.name) or _expression(one, parameters, numbers) for one in schema)


def _give_tensor_access(library) -> None:
    """Lets a library of kernels read tensors where Python holds them, if what was built for this torch says how."""
    try:
        access = importlib.import_module("ampkit._casting").tensor_access
    except (ImportError, AttributeError):
        return  # the dispatcher serves every call
    library.use_tensor_access(access)
    _direct.append(library)


def _expression(one: torch.Argument, parameters: dict[str, inspect.Parameter], numbers: set[str]) -> str:
    """What the operator is given for this argument of its schema, as an expression of the parameters' names.

    A number comes twice: as a float, and as a float32 tensor, or None, which is read on the device instead. Of ``inv_scale``
    and ``clip`` the floats come as one, ``factor``. A list that is absent is an empty one.
    """
    name = one.name
    if name in numbers:
        return f"_float({name})"
    if name.removesuffix("_tensor") in numbers:
        return f"_tensor({name.removesuffix('_tensor')})"
    if name == "factor":
        return "_float(inv_scale) * _float(clip)"
    if name in ("beta1", "beta2"):
        return f"betas[{int(name[-1]) - 1}]"
    annotation = parameters[name].annotation
    if annotation == "Tensors | None":
        return f"{name} or []"
    return f"_tensor({name})" if annotation.startswith(("Number", "PerTensor")) else name


def load_cuda_kernels() -> str:
    """Loads ampkit/_cuda, and says which torch it was built with; ImportError where that cannot be done."""
    library = importlib.import_module("ampkit._cuda")
    _give_tensor_access(library)
    return library.torch_version


def load_emulated_kernels() -> None:
    """From here on the CUDA kernels compute on the CPU, as host code: for tests, which have this library on their path."""
    library = importlib.import_module("ampkit_emulated")
    _direct.clear()
    _give_tensor_access(library.kernels)


def _float(number):
    return 1.0 if number is None or isinstance(number, torch.Tensor) else float(number)


def _tensor(number):
    if not isinstance(number, torch.Tensor):
        return None
    fits = number.dtype is torch.float32 and number.is_contiguous() and not number.requires_grad
    return number if fits else number.detach().to(torch.float32).contiguous()


def _beside(found_inf, state):
    if found_inf.device == state.device and found_inf.dtype is torch.float32:
        return found_inf
    # A kernel on the CPU reads at once: what comes from a GPU must have arrived.
    return found_inf.to(
        state.device, torch.float32, non_blocking=state.device.type == "cuda" and not found_inf.is_pinned()
    )


def _mark_written(*written):
    # torch counts the writes of its own operators only. Autograd's checks and weight-cast caches read the count.
    if written and not torch.compiler.is_compiling():
        tensors = []
        for one in written:
            if isinstance(one, torch.Tensor):
                tensors.append(one)
            elif one is not None:
                tensors += one
        torch._C._increment_version(tensors)


# What torch.compile and fake tensors need to know: operators that only write have nothing to say about results.
for _name, _op in ops.items():
    if not _op._schema.returns:
        torch.library.register_fake(f"ampkit::{_name}", lambda *args: None)


@torch.library.register_fake("ampkit::multi_tensor_unscale_l2norm")
def _fake_norms(inputs, outputs, inv_scale, inv_scale_tensor, found_inf, per_tensor, first_bad):
    each = inputs[0].new_empty(len(inputs) if per_tensor else 0, dtype=torch.float32)
    return inputs[0].new_empty(1, dtype=torch.float32), each


_give_tensor_access(_C)
