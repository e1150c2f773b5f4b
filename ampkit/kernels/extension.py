"""The operators of torch.ops.ampkit, called like the functions in plain torch that define them.

Importing this module loads ampkit/_C, which registers the schemas and the CPU kernels (csrc/registration.cpp), and
raises ImportError where that cannot be done. Lists given to these functions lie on one device and hold float32, float16
and bfloat16 only; routing.py sees to that.
"""

import importlib
import inspect
import math
from collections.abc import Callable

import torch

# By name: `from ampkit import _C` would call a library that was never built a circular import.
_C = importlib.import_module("ampkit._C")

built_with: str = _C.torch_version
_NORMS = ("l2norm", "unscale_l2norm", "restore_l2norm")
_STEPS = ("sgd", "adam", "adagrad", "lamb", "novograd")
_OPERATORS = (
    *(f"multi_tensor_{name}" for name in ("scale", "axpby", "restore", "accumulate", *_NORMS, *_STEPS)),
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

_SPECIAL = {
    "multi_tensor_scale": {"inputs": "_source(inputs, outputs)"},
    "update_scale": {"found_inf": "_beside(found_inf, scale)"},
}


def kernel(function: Callable) -> Callable:
    """The operator of this name, to be called with the arguments of ``function``.

    Its schema lists the same arguments, flat. What stands for each is an expression (see `_expression`), and all of them are
    compiled here into one call: a loop over the schema would take longer than the work on small tensors.
    """
    parameters = inspect.signature(function).parameters
    schema = ops[function.__name__]._schema.arguments
    names = {one.name for one in schema}
    numbers = {name for name in names if f"{name}_tensor" in names}
    special = _SPECIAL.get(function.__name__, {})
    arguments = [special.get(one.name) or _expression(one, parameters, numbers) for one in schema]
    written = [i for i, one in enumerate(schema) if one.alias_info is not None and one.alias_info.is_write]
    _callers[function.__name__] = _caller(function.__name__, written)
    call = f"_callers[{function.__name__!r}]({', '.join(arguments)})"
    # Keywords follow one another in any order; `operator` gives all of them.
    bare = [f"{one.name}={None if one.default is one.empty else one.default}" for one in parameters.values()]
    return eval(f"lambda {', '.join(bare)}: {call}", {**globals(), "inf": math.inf})


def _caller(name: str, written: list[int]) -> Callable:
    """Calls an operator: directly where the library can read the tensors (csrc/direct.h), else through torch's dispatcher."""
    op = ops[name]
    directly = [getattr(library, name) for library in _direct if hasattr(library, name)]
    mask = sum(1 << i for i in written)

    def call(*arguments):
        if not torch.compiler.is_compiling():
            for method in directly:
                result = method(mask, *arguments)
                if result is not NotImplemented:
                    return result
        result = op(*arguments)
        _mark_written(*[arguments[i] for i in written])
        return result

    return call


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


def _source(inputs, outputs):
    """Nothing where a list is scaled in place: the dispatcher would hand over every tensor twice."""
    return [] if not torch.compiler.is_compiling() and inputs is outputs else inputs


def _beside(found_inf, scale):
    if found_inf.device == scale.device and found_inf.dtype is torch.float32:
        return found_inf
    # A kernel on the CPU reads at once: what comes from a GPU must have arrived.
    return found_inf.to(
        scale.device, torch.float32, non_blocking=scale.device.type == "cuda" and not found_inf.is_pinned()
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


def _fake_norms(where):
    def norms(tensors, *rest):
        each = tensors[0].new_empty(len(tensors) if rest[where] else 0, dtype=torch.float32)
        return tensors[0].new_empty(1, dtype=torch.float32), each

    return norms


for _name in _NORMS:
    _arguments = [one.name for one in ops[f"multi_tensor_{_name}"]._schema.arguments]
    torch.library.register_fake(f"ampkit::multi_tensor_{_name}", _fake_norms(_arguments.index("per_tensor") - 1))

_give_tensor_access(_C)
