"""What stands in torch's place under O1: one factory of wrappers per `CastKind`.

Each wrapper asks on every call whether casting is on, and otherwise calls straight through, so that a reference
somebody kept is inert after the engine closes. The engine calls `wrap`; nothing here patches anything.

Note [what is never cast]
    An explicit ``dtype=`` is the caller's choice, and such a call goes through as it is. ``out=`` and in-place
    functions keep their tensor, its dtype and its storage. float64, integer and complex tensors, and tensors on devices
    that are not the session's, stay as they are; a whitelisted call with a float64 or complex argument goes through
    unchanged, since it is either all float64 already or torch's own error.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..compiling import thread_ident
from ..errors import RefusedOperation
from ..policy.rules import CastKind
from .cache import is_weight
from .inside import without_copies
from .tensors import CASTABLE, CONVERT, LOWER_PRECISION, map_tensors, tensors_in

if TYPE_CHECKING:
    from .engine import Casting

Convert = Callable[[Tensor], Tensor]

_logger = logging.getLogger("ampkit")

_EXACT = frozenset({torch.float64, torch.complex32, torch.complex64, torch.complex128})
_NO_TENSORS = frozenset({int, float, bool, str, type(None), torch.Size})
_ADVICE = {
    "binary_cross_entropy": "probabilities near 0 and 1 are rounded to 0 and 1 there, and their logarithm is infinite. Leave "
    "out the sigmoid and use binary_cross_entropy_with_logits (nn.BCEWithLogitsLoss), which is safe. Or have the "
    "probabilities computed in float32, with ampkit.register_float_function(torch, 'sigmoid') or inside 'with "
    "ampkit.disable_casts():'.",
}
_ANY_ADVICE = "the policy refuses it in lower precision. Give it float32, or change its row (policy={...})."
_TYPE_NAMES = {torch.float32: "Float", torch.float16: "Half", torch.bfloat16: "BFloat16"}


def wrap(kind: CastKind, original: Callable, casting: Casting, owner: Any, name: str) -> Callable:
    """A function to stand at ``owner.name`` in place of ``original``."""
    is_torch = owner is Tensor or (isinstance(owner, ModuleType) and owner.__name__.partition(".")[0] == "torch")
    plain = _FACTORIES[kind](kind, original, casting, name, is_torch)
    wrapper = _naming_out(plain, original)
    # C++ knows out= by its keyword only, and does not write the log of casts.
    in_cpp = casting.fast_calls is not None and is_torch and wrapper is plain and casting.verbosity < 2
    saving = None
    if kind is CastKind.FP32:
        log = None if casting.verbosity < 2 else lambda x: _log_cast(x, torch.float32, name)
        saving = without_copies(wrapper, original, casting, owner, name, log)
    wrapper = saving or wrapper
    _name_like(wrapper, original, owner, name)
    if not in_cpp:
        return wrapper
    target = _target(kind, casting)
    weights = {}
    if kind in (CastKind.LOWER_PRECISION_FP, CastKind.BFLOAT16):
        weights = {"store": casting.cache(target).store, "cast_weight": caster(kind, casting, name)}
    # What C++ refuses in lower precision it leaves to Python.
    fast = casting.fast_calls.around(
        wrapper, original, owner, name, CastKind.BANNED if saving else kind, target, **weights
    )
    if isinstance(fast, FunctionType):
        _name_like(fast, original, owner, name)
    return fast


def _name_like(wrapper: Callable, original: Callable, owner: Any, name: str) -> None:
    functools.update_wrapper(wrapper, original)
    # Built-in functions name modules and classes that pickle would find the original under.
    if isinstance(owner, ModuleType):
        wrapper.__module__, wrapper.__qualname__ = owner.__name__, name
    elif owner is Tensor:
        wrapper.__module__, wrapper.__qualname__ = "torch", f"Tensor.{name}"


def caster(kind: CastKind, casting: Casting, name: str, only_reads: bool = False) -> Convert:
    """The cast of a single tensor that a rule of this kind asks for (not for kinds that look at all arguments).

    ``only_reads`` tells that the cast goes to a function of torch, which will not write to it: others may share it.
    """
    target = _target(kind, casting)
    convert = _converter(target, casting, name)
    if kind is CastKind.FP32:
        return lambda x: convert(x) if x.dtype in LOWER_PRECISION else x
    cached = casting.cache(target).cast
    shared = casting.cache(target).cast_activation if only_reads else None

    def lower(x: Tensor) -> Tensor:
        if x.dtype is target or x.dtype not in CASTABLE:
            return x
        if is_weight(x):
            return cached(x, convert)
        return convert(x) if shared is None else shared(x, convert)

    return lower


def promoter(casting: Casting, name: str, *values: Any) -> Convert | None:
    """The cast to the widest dtype among the tensors in ``values``, or None when nothing is to be cast."""
    floating = [x for x in tensors_in(*values) if x.is_floating_point() or x.is_complex()]
    dtypes = {x.dtype for x in floating}
    if len(dtypes) < 2 or not dtypes <= CASTABLE:
        return None
    # As everywhere in torch, 0-dim tensors have no say where there are others.
    deciding = [x.dtype for x in floating if x.dim()] or dtypes
    widest = functools.reduce(torch.promote_types, deciding)
    convert = _converter(widest, casting, name)
    return lambda x: convert(x) if x.dtype in CASTABLE and x.dtype is not widest else x


def _one_dtype(kind: CastKind, original: Callable, casting: Casting, name: str, is_torch: bool) -> Callable:
    """LOWER_PRECISION_FP, BFLOAT16, FP32: every floating argument to one dtype."""
    target = _target(kind, casting)
    cast = caster(kind, casting, name, only_reads=is_torch)
    to_be_cast = LOWER_PRECISION if kind is CastKind.FP32 else CASTABLE - {target}
    untouchable = frozenset() if kind is CastKind.FP32 else _EXACT
    suspended = casting.suspended
    # Parameters go to the cache directly: a weight that is in it costs no more than the look-up.
    convert = _converter(target, casting, name)
    cached = (lambda x, _: cast(x)) if kind is CastKind.FP32 else casting.cache(target).cast

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not casting.enabled or (suspended and thread_ident() in suspended):
            return original(*args, **kwargs)
        if kwargs:
            for value in kwargs.values():
                if type(value) not in _NO_TENSORS and not _is_sizes(value):
                    return any_call(args, kwargs)
        converted = []
        for value in args:
            exact_type = type(value)
            if exact_type is Parameter or exact_type is Tensor:
                dtype = value.dtype
                if dtype is not target:
                    if dtype in to_be_cast:
                        value = cached(value, convert) if exact_type is Parameter else cast(value)
                    elif dtype in untouchable:
                        return original(*args, **kwargs)
            elif exact_type not in _NO_TENSORS and not _is_sizes(value):
                return any_call(args, kwargs)
            converted.append(value)
        return original(*converted, **kwargs) if kwargs else original(*converted)

    def any_call(args: tuple, kwargs: dict[str, Any]) -> Any:
        """The same for containers, subclasses and tensors given by keyword; see Note [what is never cast]."""
        if _has_dtype(args, kwargs) or any(x.dtype in untouchable for x in tensors_in(args, kwargs)):
            return original(*args, **kwargs)
        out = kwargs.pop("out", None)
        if out is None:
            return original(*map_tensors(args, cast), **map_tensors(kwargs, cast))
        goal = _dtype_of(out)
        if kind is CastKind.FP32 and goal is not torch.float32:
            return original(*args, **kwargs, out=out)
        fit = _fitting(goal, casting, name)
        return original(*map_tensors(args, fit), **map_tensors(kwargs, fit), out=out)

    return wrapper


def _promote(kind: CastKind, original: Callable, casting: Casting, name: str, is_torch: bool) -> Callable:
    """PROMOTE and PROMOTE_SEQUENCE: all to the widest dtype, where torch would refuse the mixture."""
    suspended = casting.suspended

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not casting.enabled or (suspended and thread_ident() in suspended) or _has_dtype(args, kwargs):
            return original(*args, **kwargs)
        if kwargs.get("out") is not None:
            out = kwargs.pop("out")
            fit = _fitting(_dtype_of(out), casting, name)
            return original(*map_tensors(args, fit), **map_tensors(kwargs, fit), out=out)
        widen = promoter(casting, name, args, kwargs)
        if widen is None:
            return original(*args, **kwargs)
        return original(*map_tensors(args, widen), **map_tensors(kwargs, widen))

    return wrapper


def _match_first(kind: CastKind, original: Callable, casting: Casting, name: str, is_torch: bool) -> Callable:
    """MATCH_FIRST: in-place functions, whose first argument fixes the dtype."""
    suspended = casting.suspended

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not casting.enabled or (suspended and thread_ident() in suspended) or not args:
            return original(*args, **kwargs)
        first, *others = args
        dtype = getattr(first, "dtype", None)
        if dtype not in CASTABLE:
            return original(*args, **kwargs)
        fit = _fitting(dtype, casting, name)
        # The tensors of these functions are arguments of their own; lists hold indices only.
        others = [fit(x) if isinstance(x, Tensor) else x for x in others]
        named = {key: fit(x) if isinstance(x, Tensor) else x for key, x in kwargs.items()}
        return original(first, *others, **named)

    return wrapper


def _reject(kind: CastKind, original: Callable, casting: Casting, name: str, is_torch: bool) -> Callable:
    """REJECT: in-place functions whose result need not fit into float16."""
    suspended = casting.suspended

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if casting.enabled and not (suspended and thread_ident() in suspended):
            first = args[0] if args else kwargs.get("input")
            if isinstance(first, Tensor) and first.dtype is torch.float16 and _is_ours(first, casting):
                raise RefusedOperation(
                    f"{name}() was called on a float16 tensor while O1 is active: its result may not fit into float16, "
                    f"and in place it cannot become float32. Call {name.rstrip('_')}(), which returns float32, or put "
                    f"the call into 'with ampkit.disable_casts():'."
                )
        return original(*args, **kwargs)

    return wrapper


def _ban(kind: CastKind, original: Callable, casting: Casting, name: str, is_torch: bool) -> Callable:
    """BANNED: functions that lose their meaning in lower precision, or that the user's policy refuses."""
    suspended = casting.suspended

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if casting.enabled and not (suspended and thread_ident() in suspended):
            for x in tensors_in(args, kwargs):
                if x.dtype in LOWER_PRECISION and _is_ours(x, casting):
                    raise RefusedOperation(
                        f"{name}() was called with a {x.dtype} tensor while O1 is active: {_ADVICE.get(name, _ANY_ADVICE)}"
                    )
        return original(*args, **kwargs)

    return wrapper


_FACTORIES = {
    CastKind.LOWER_PRECISION_FP: _one_dtype,
    CastKind.BFLOAT16: _one_dtype,
    CastKind.FP32: _one_dtype,
    CastKind.PROMOTE: _promote,
    CastKind.PROMOTE_SEQUENCE: _promote,
    CastKind.MATCH_FIRST: _match_first,
    CastKind.REJECT: _reject,
    CastKind.BANNED: _ban,
}


def _naming_out(wrapper: Callable, original: Callable) -> Callable:
    """``wrapper`` for a function that takes ``out`` by position too, as ``torch.norm`` does: it knows the keyword only."""
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


def _target(kind: CastKind, casting: Casting) -> torch.dtype:
    if kind is CastKind.LOWER_PRECISION_FP:
        return casting.lower_precision
    return torch.bfloat16 if kind is CastKind.BFLOAT16 else torch.float32


def _converter(dtype: torch.dtype, casting: Casting, name: str) -> Convert:
    """The cast to ``dtype`` of a tensor on one of the session's devices; others are returned as they are."""
    to_dtype = CONVERT[dtype]
    device_types = casting.device_types

    def convert(x: Tensor) -> Tensor:
        # x.device.type alone costs ten times as much as is_cpu.
        if ("cpu" if x.is_cpu else x.device.type) in device_types:
            return to_dtype(x)
        return x

    if casting.verbosity < 2:
        return convert

    def convert_and_log(x: Tensor) -> Tensor:
        cast = convert(x)
        if cast is not x:
            _log_cast(x, dtype, name)
        return cast

    return convert_and_log


def _log_cast(x: Tensor, dtype: torch.dtype, name: str) -> None:
    _logger.info("%s->%s (%s)", _TYPE_NAMES[x.dtype], _TYPE_NAMES[dtype], name)


def _fitting(dtype: torch.dtype | None, casting: Casting, name: str) -> Convert:
    """The cast of arguments for a tensor of ``dtype`` that will be written to; none when that is float64, say."""
    if dtype not in CASTABLE:
        return lambda x: x
    convert = _converter(dtype, casting, name)
    return lambda x: convert(x) if x.dtype in CASTABLE and x.dtype is not dtype else x


def _is_ours(x: Tensor, casting: Casting) -> bool:
    return x.device.type in casting.device_types


def _is_sizes(value: Any) -> bool:
    """Whether ``value`` is a tuple or list of numbers (a stride, a normalized_shape), which holds nothing to cast."""
    return type(value) in (tuple, list) and (len(value) == 0 or type(value[0]) is int)


def _has_dtype(args: tuple, kwargs: dict[str, Any]) -> bool:
    return kwargs.get("dtype") is not None or any(type(value) is torch.dtype for value in args)


def _dtype_of(out: Any) -> torch.dtype | None:
    return next((x.dtype for x in tensors_in(out)), None)
