"""Wrappers of torch's functions that cast their arguments: one factory for each `CastKind`.

`_where_casts_are_off` asks on every call whether casting is on, and calls torch's function if not, so that a wrapper that a
script has kept casts nothing after the engine closes. The wrapper inside of it runs if casts are on. The engine calls `wrap`;
this module patches nothing.

Note [what is never cast]
    An explicit ``dtype=`` is the caller's choice, and such a call goes through as it is. ``out=`` and in-place
    functions keep their tensor, its dtype and its storage. float64, integer and complex tensors, and tensors on devices
    that are not the session's, stay as they are; a whitelisted call with a float64 or complex argument goes through
    unchanged, since it is either all float64 already or torch's own error. One with a sparse matrix computes in float32: for most
    layouts torch has no lower-precision kernel, and no derivative that takes two dtypes.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverloadPacket
from torch.nn import Parameter
from torch.overrides import handle_torch_function, has_torch_function

from ..dtypes import CASTABLE, LOWER_PRECISION
from ..errors import RefusedOperation
from ..patching import Undo
from ..policy.cast_rules import CastKind, CastRule
from ..policy.tables import CPU_LIST, CUDA_LIST
from .cpp_wrappers import wrap_in_cpp
from .fp32_functions import WORTHWHILE, saving_the_input, with_dtype, with_gradients_of_tables, with_rows_of_bags
from .state import CastingState, past_autocast
from .tensors import CONVERT, LEAVES, map_tensors, tensors_in, to_float32

Convert = Callable[[Tensor], Tensor]

_logger = logging.getLogger("ampkit")
_compiling = torch.compiler.is_compiling
_tracing = torch._C._get_tracing_state

_EXACT = frozenset({torch.float64, torch.complex32, torch.complex64, torch.complex128})
_SPARSE = frozenset({torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})
# NumPy's arrays lie in host memory, which is not on the devices of most sessions.
_TO_NUMPY = frozenset({"numpy", "__array__"})
_ADVICE = {
    "binary_cross_entropy": "probabilities near 0 and 1 are rounded to 0 and 1 there, and their logarithm is infinite. Leave "
    "out the sigmoid and use binary_cross_entropy_with_logits (nn.BCEWithLogitsLoss), which is safe. Or have the "
    "probabilities computed in float32, with ampkit.register_float_function(torch, 'sigmoid') or inside 'with "
    "ampkit.disable_casts():'.",
}
_ANY_ADVICE = "the policy refuses it in lower precision. Give it float32, or change its row (policy={...})."
_TYPE_NAMES = {torch.float32: "Float", torch.float16: "Half", torch.bfloat16: "BFloat16"}


def wrap(rule: CastRule, original: Callable, state: CastingState, undo: Undo) -> Callable:
    """Wrap ``original``, the function at ``rule.owner.name``, as the rule says, until the `undo`."""
    kind, owner, name = rule.kind, rule.owner, rule.name
    is_torch = owner is Tensor or (isinstance(owner, ModuleType) and owner.__name__.partition(".")[0] == "torch")
    beneath = original if owner is not Tensor or isinstance(original, FunctionType) else _known_to_tables(original)
    as_it_is = past_autocast(beneath, state) if is_torch else beneath
    plain = as_it_is if kind is CastKind.NATIVE else _FACTORIES[kind](kind, beneath, as_it_is, state, name)
    if is_torch and kind is CastKind.LOWER_PRECISION_FP and name in _RECURRENT:
        plain = _in_one_chunk(plain, original, state)
    wrapper = _naming_out(plain, original)
    # C++ knows out= by its keyword only, and does not write the log of casts.
    in_cpp = (
        state.control is not None and is_torch and wrapper is plain and state.verbosity < 2 and name not in _TO_NUMPY
    )
    in_cpp = in_cpp and kind not in (CastKind.CONTRACTION, CastKind.FP32_WEIGHTS)
    if kind is CastKind.LOWER_PRECISION_FP and isinstance(original, FunctionType) and name in _WIDENED_BY_AUTOCAST:
        in_cpp = False  # it leaves torch.autocast on beneath functions in Python
    casting, saving = wrapper, None
    if owner is torch and name == "embedding" and kind is CastKind.FP32:
        casting, in_cpp = with_gradients_of_tables(wrapper, original, state), False
    elif owner is torch and name == "embedding_bag" and kind is CastKind.PROMOTE:
        casting = with_rows_of_bags(wrapper, state)
    elif kind is CastKind.FP32 and state.verbosity < 2:  # the log of casts is written where a copy is made
        casting = with_dtype(wrapper, original, state, owner, name)
        saving = saving_the_input(wrapper, original, state, owner, name)
    if saving is not None or rule.narrow:
        casting = _float32_inside(casting, saving, rule.narrow, as_it_is if name in _ROUND_ONCE else None, state)
    in_python = _where_casts_are_off(rule, casting, beneath, state)
    # What C++ refuses in lower precision it leaves to Python.
    in_cpp_as = kind if casting is wrapper else CastKind.BANNED
    function = _around(in_python, original, owner, name, in_cpp_as, state, undo) if in_cpp else in_python
    if isinstance(function, FunctionType):
        _name_like(function, original, owner, name)
    return function


def _around(
    in_python: Callable, original: Callable, owner: Any, name: str, kind: CastKind, state: CastingState, undo: Undo
) -> Callable:
    """Put a wrapper in C++ around one in Python, until the `undo`; the one in Python itself, where C++ has no shape for it."""
    target, weights = _target(kind, state), {}
    if kind in (CastKind.LOWER_PRECISION_FP, CastKind.BFLOAT16):
        weights = {"store": state.caches.of(target), "cast_weight": caster(kind, state, name)}
    function = wrap_in_cpp(state.control, undo, in_python, original, owner, name, kind, target, **weights)
    if function is None:
        return in_python
    if not isinstance(original, FunctionType) and original.__name__ == name:
        return function

    # For a function that torch wrote in Python, or that is pickled under another name than its own (``linalg_norm``).
    def call(*args: Any, **kwargs: Any) -> Any:
        if _compiling():
            return in_python(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def _known_to_tables(method: Callable) -> Callable:
    """Wrap a method so that a ``__torch_function__`` gets the method itself: tables of functions there lack ampkit's wrapper."""

    def call(*args: Any, **kwargs: Any) -> Any:
        relevant = (*args, *kwargs.values())
        if _compiling() or not has_torch_function(relevant):
            return method(*args, **kwargs)
        return handle_torch_function(method, relevant, *args, **kwargs)

    return call


def _float32_inside(
    wrapper: Callable, saving: Callable | None, has_narrow: bool, native: Callable | None, state: CastingState
) -> Callable:
    """Wrap a row in float32 that must not keep a copy of a large input, or has narrow results in models that have them.

    ``saving`` keeps the input in its own precision. ``native`` computes in float32 inside and rounds once.
    """

    def inside(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs.get("input")
        dtype = getattr(x, "dtype", None)
        if dtype not in LOWER_PRECISION:
            return wrapper(*args, **kwargs)
        is_narrow = has_narrow and state.stores and state.is_narrow()
        if is_narrow and native is not None:  # in another precision too, where a call names one
            return native(*args, **kwargs)
        # In a trace a size is symbolic, or a tensor.
        has_size = type(x) in (Tensor, Parameter) and not _compiling() and _tracing() is None
        is_large = saving is not None and has_size and x.numel() >= WORTHWHILE
        result = (saving if is_large else wrapper)(*args, **kwargs)
        is_wide = is_narrow and isinstance(result, Tensor) and result.dtype is torch.float32
        return result.to(dtype) if is_wide else result

    return inside


_ROUND_ONCE = frozenset({"softmax", "softmin", "pow", "__pow__", "__rpow__"})


def _where_casts_are_off(rule: CastRule, wrapper: Callable, original: Callable, state: CastingState) -> Callable:
    """Wrap ``wrapper``, for calls where casts are on; where they are off see "Where the tables hold" in models/NOTES.md."""
    wants_one_dtype = rule.kind in (CastKind.LOWER_PRECISION_FP, CastKind.CONTRACTION, CastKind.PROMOTE)
    wants_float32 = rule.name == "matrix_exp"  # whose gradients are NaN in bfloat16

    def call(*args: Any, **kwargs: Any) -> Any:
        if state.is_on():
            return wrapper(*args, **kwargs)
        if not state.stores:
            return original(*args, **kwargs)
        tensors = list(tensors_in(args, kwargs))
        lower = [x for x in tensors if x.dtype in LOWER_PRECISION]
        if (region := state.region_for(lower)) is not None:
            with region:
                return wrapper(*args, **kwargs)
        meets_float32 = wants_one_dtype and any(x.dtype is torch.float32 and x.dim() for x in tensors)
        if lower and (wants_float32 or meets_float32 or all(type(x) is Parameter for x in lower)):
            return original(*map_tensors(args, state.in_float32), **map_tensors(kwargs, state.in_float32))
        return original(*args, **kwargs)

    return call


_WIDENED_BY_AUTOCAST = frozenset(
    name for group in (*CPU_LIST, *CUDA_LIST) for name in group.names if group.kind in (CastKind.FP32, CastKind.BANNED)
)
#: Names of functions whose arguments torch.autocast casts on some device. Others that the tables leave alone are not patched.
CAST_BY_AUTOCAST = frozenset(name for group in (*CPU_LIST, *CUDA_LIST) for name in group.names) | {
    *("cat", "concat", "concatenate", "stack", "index_copy"),
}


def _name_like(wrapper: Callable, original: Callable, owner: Any, name: str) -> None:
    functools.update_wrapper(wrapper, original)
    # ``torch.ops.torchvision.nms``: compilers and libraries ask for its overloads.
    if isinstance(original, OpOverloadPacket):
        wrapper.overloads = original.overloads
        overloads = {name: getattr(original, name) for name in original.overloads()}
        wrapper.op_overloads = lambda: list(overloads.values())  # torch 2.15 asks every operator for it
        wrapper.__dict__.update(overloads)
    # Built-in functions name modules and classes that pickle would find the original under.
    if isinstance(owner, ModuleType):
        wrapper.__module__, wrapper.__qualname__ = owner.__name__, name
    elif owner is Tensor:
        wrapper.__module__, wrapper.__qualname__ = "torch", f"Tensor.{name}"


def caster(kind: CastKind, state: CastingState, name: str, dtype: torch.dtype | None = None) -> Convert:
    """The cast of a single tensor that a rule of this kind asks for; ``dtype`` is another lower precision than the session's."""
    target = dtype or _target(kind, state)
    convert = _converter(target, state, name)
    if kind is CastKind.FP32:
        return convert

    def lower(x: Tensor) -> Tensor:
        # Other leaves are inputs, which scripts edit through .data; subclasses carry more than a storage and a version.
        if type(x) is Parameter and x.dtype is not target and x.dtype in CASTABLE:
            return state.caches.cast(target, x, convert)
        return convert(x)

    return lower


def promoter(state: CastingState, name: str, *values: Any) -> Convert | None:
    """The cast to the widest dtype among the tensors in ``values``, or None when nothing is to be cast."""
    floating = [x for x in tensors_in(*values) if x.is_floating_point() or x.is_complex()]
    dtypes = {x.dtype for x in floating}
    if len(dtypes) < 2 or not dtypes <= CASTABLE:
        return None
    # As everywhere in torch, 0-dim tensors have no say where there are others.
    deciding = [x.dtype for x in floating if x.dim()] or dtypes
    return _converter(functools.reduce(torch.promote_types, deciding), state, name)


def _one_dtype(kind: CastKind, original: Callable, as_it_is: Callable, state: CastingState, name: str) -> Callable:
    """Wrap for LOWER_PRECISION_FP, BFLOAT16 or FP32: cast every floating argument to one dtype; see Note [what is never cast]."""
    cast_here = caster(kind, state, name)
    agrees = name not in _RECURRENT and name not in _WIDENED_BY_AUTOCAST
    call = original if kind is CastKind.LOWER_PRECISION_FP and agrees else as_it_is
    is_fp32 = kind is CastKind.FP32
    to_be_cast = LOWER_PRECISION if is_fp32 else CASTABLE

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        odd = [] if is_fp32 else [x for x in tensors_in(args, kwargs) if x.dtype in _EXACT or x.layout in _SPARSE]
        if _has_dtype(args, kwargs) or (odd and any([x.dtype in _EXACT for x in odd])):
            return as_it_is(*args, **kwargs)
        if odd:
            return as_it_is(*map_tensors(args, to_float32), **map_tensors(kwargs, to_float32))
        cast = cast_here
        if kind is CastKind.LOWER_PRECISION_FP and (dtype := state.other_precision()) is not None:
            cast = caster(kind, state, name, dtype=dtype)
            if dtype is torch.float16 and state.on_float16_region is not None and not _compiling():
                if torch.is_grad_enabled() and any([x.requires_grad for x in tensors_in(args, kwargs)]):
                    state.on_float16_region()
        if (out := kwargs.get("out")) is None:
            converted = []
            for x in args:
                if isinstance(x, Tensor):
                    x = cast(x) if x.dtype in to_be_cast else x
                elif not isinstance(x, LEAVES) and not (type(x) is tuple and set(map(type, x)) <= {int}):  # a shape
                    x = map_tensors(x, cast)
                converted.append(x)
            return call(*converted, **map_tensors(kwargs, cast)) if kwargs else call(*converted)
        if is_fp32 and _dtype_of(out) is not torch.float32:
            return as_it_is(*args, **kwargs)
        return _into(out, as_it_is, args, kwargs, state, name)

    return wrapper


def _into(out: Any, function: Callable, args: tuple, kwargs: dict, state: CastingState, name: str) -> Any:
    """Call ``function`` with ``out=``, and with arguments in the dtype of ``out``."""
    fit = _converter(_dtype_of(out), state, name)
    return function(*map_tensors(args, fit), **map_tensors({**kwargs, "out": None}, fit) | {"out": out})


def _promote(kind: CastKind, original: Callable, as_it_is: Callable, state: CastingState, name: str) -> Callable:
    """Wrap for PROMOTE: cast all arguments to the widest dtype, where torch would refuse the mixture."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _has_dtype(args, kwargs):
            return as_it_is(*args, **kwargs)
        if (out := kwargs.get("out")) is not None:
            return _into(out, as_it_is, args, kwargs, state, name)
        widen = promoter(state, name, args, kwargs)
        if widen is None:
            return as_it_is(*args, **kwargs)
        return as_it_is(*map_tensors(args, widen), **map_tensors(kwargs, widen))

    return wrapper


def _contract(kind: CastKind, original: Callable, as_it_is: Callable, state: CastingState, name: str) -> Callable:
    """Wrap for CONTRACTION: einsum is a matrix product, or only multiplies and moves elements."""
    lower = _one_dtype(CastKind.LOWER_PRECISION_FP, original, as_it_is, state, name)
    promoted = _promote(CastKind.PROMOTE, original, as_it_is, state, name)

    def wrapper(*args: Any) -> Any:
        return (lower if _sums_over_an_index(args) else promoted)(*args)

    return wrapper


def _sums_over_an_index(args: tuple) -> bool:
    """Whether einsum sums over an index. ``args`` are an equation and operands, or operands and lists of indices in turn."""
    if args and isinstance(args[0], str):
        inputs, arrow, output = args[0].replace(" ", "").partition("->")
        indices, output = inputs.replace(",", "").replace("...", "."), output if arrow else None
    else:
        indices = [index for of_operand in args[1::2] for index in of_operand]
        output = args[-1] if len(args) % 2 else None
    if output is None:  # the output has the indices that occur once, and the ellipsis
        return any(indices.count(index) > 1 for index in indices if index is not Ellipsis and index != ".")
    return any(index not in output for index in indices)


def _match_first(kind: CastKind, original: Callable, as_it_is: Callable, state: CastingState, name: str) -> Callable:
    """Wrap for MATCH_FIRST: in-place functions, whose first argument fixes the dtype."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not args:
            return original(*args, **kwargs)
        first, *rest = args
        dtype = getattr(first, "dtype", None)
        if dtype not in CASTABLE:
            return as_it_is(*args, **kwargs)
        fit = _converter(dtype, state, name)
        # The tensors of these functions are arguments of their own; lists hold indices only.
        rest = [fit(x) if isinstance(x, Tensor) else x for x in rest]
        named = {key: fit(x) if isinstance(x, Tensor) else x for key, x in kwargs.items()}
        return as_it_is(first, *rest, **named)

    return wrapper


def _fp32_weights(kind: CastKind, original: Callable, as_it_is: Callable, state: CastingState, name: str) -> Callable:
    """Wrap for FP32_WEIGHTS: batch norm, which takes float32 weights and statistics beside an input in any precision."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not state.stores:
            return original(*args, **kwargs)
        statistics = (*args[1:3], kwargs.get("running_mean"), kwargs.get("running_var"))
        # Batch norm writes to them, and would write to a cast copy.
        if any(isinstance(x, Tensor) and x.dtype in LOWER_PRECISION for x in statistics):
            return original(*args, **kwargs)
        x = {"input": kwargs.pop("input")} if "input" in kwargs else {}
        return original(*args[:1], *map_tensors(args[1:], to_float32), **x, **map_tensors(kwargs, to_float32))

    return wrapper


def _refuse(kind: CastKind, original: Callable, as_it_is: Callable, state: CastingState, name: str) -> Callable:
    """Wrap for BANNED, functions that lose their meaning in lower precision, or REJECT, in-place ones that may overflow float16."""
    in_place = kind is CastKind.REJECT
    refused = (torch.float16,) if in_place else LOWER_PRECISION
    advice = (
        "its result may not fit into float16, and in place it cannot become float32. "
        f"Call {name.rstrip('_')}(), which returns float32, or put the call into 'with ampkit.disable_casts():'."
    )

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if name in _ADVICE and state.is_narrow():  # lower precision is what such a model has
            return as_it_is(*map_tensors(args, to_float32), **map_tensors(kwargs, to_float32))
        looked_at = (args[0] if args else kwargs.get("input"),) if in_place else (args, kwargs)
        for x in tensors_in(*looked_at):
            if x.dtype in refused and state.casts_on(x.device.type):
                raise RefusedOperation(
                    f"{name}() was called with a {x.dtype} tensor while casts are on: "
                    f"{advice if in_place else _ADVICE.get(name, _ANY_ADVICE)}"
                )
        return as_it_is(*args, **kwargs)

    return wrapper


_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})


def _in_one_chunk(wrapper: Callable, original: Callable, state: CastingState) -> Callable:
    """Wrap a recurrent layer: calls of cuDNN in float16 are left to torch.autocast, which casts their weights into one chunk.

    Casts that are made one by one lie apart: in every call torch copies them together, and warns. torch.autocast makes one chunk,
    but in float16 whatever its precision is (``_cudnn_rnn_cast_reflatten`` in torch's AutocastRNN.cpp).
    """

    def recurrent(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], Tensor) and torch.backends.cudnn.is_acceptable(args[0]):
            if (state.other_precision() or state.lower_precision) is torch.float16:
                return original(*args, **kwargs)
        return wrapper(*args, **kwargs)

    return recurrent


_FACTORIES = {
    CastKind.LOWER_PRECISION_FP: _one_dtype,
    CastKind.BFLOAT16: _one_dtype,
    CastKind.FP32: _one_dtype,
    CastKind.PROMOTE: _promote,
    CastKind.CONTRACTION: _contract,
    CastKind.MATCH_FIRST: _match_first,
    CastKind.FP32_WEIGHTS: _fp32_weights,
    CastKind.REJECT: _refuse,
    CastKind.BANNED: _refuse,
}


def _naming_out(wrapper: Callable, original: Callable) -> Callable:
    """Wrap ``wrapper``, which knows ``out`` by keyword only, for a function that takes it by position too (``torch.norm``)."""
    if not isinstance(original, FunctionType):
        return wrapper
    names = original.__code__.co_varnames[: original.__code__.co_argcount]
    if "out" not in names:
        return wrapper
    at = names.index("out")

    def naming_out(*args: Any, **kwargs: Any) -> Any:
        if at < len(args) <= len(names):
            return wrapper(*args[:at], **dict(zip(names[at:], args[at:])), **kwargs)
        return wrapper(*args, **kwargs)

    return naming_out


def _target(kind: CastKind, state: CastingState) -> torch.dtype:
    if kind is CastKind.LOWER_PRECISION_FP:
        return state.lower_precision
    return torch.bfloat16 if kind is CastKind.BFLOAT16 else torch.float32


def _converter(dtype: torch.dtype | None, state: CastingState, name: str) -> Convert:
    """The cast to ``dtype`` of a tensor in another precision, on one of the session's devices; others are returned unchanged."""
    if dtype not in CASTABLE:  # float64, say
        return lambda x: x
    to_dtype, casts_on = CONVERT[dtype], state.casts_on
    elsewhere = torch.bfloat16 if name in _TO_NUMPY else None

    def convert(x: Tensor) -> Tensor:
        if x.dtype is dtype or x.dtype not in CASTABLE:
            return x
        # x.device.type alone costs ten times as much as is_cpu.
        if not casts_on("cpu" if x.is_cpu else x.device.type) and x.dtype is not elsewhere:
            return x
        if state.verbosity >= 2:
            _logger.info("%s->%s (%s)", _TYPE_NAMES[x.dtype], _TYPE_NAMES[dtype], name)
        return to_dtype(x)

    return convert


def _has_dtype(args: tuple, kwargs: dict[str, Any]) -> bool:
    named = kwargs.get("dtype", kwargs.get("out_dtype"))
    return named is not None or torch.dtype in set(map(type, args))


def _dtype_of(out: Any) -> torch.dtype | None:
    return next((x.dtype for x in tensors_in(out)), None)
