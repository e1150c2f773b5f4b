"""The user's own functions: decorators, and registrations by name, which may be used before there is a session.

A decorated function casts every tensor it is given; a registered one is patched like a row of the tables, so that ``dtype=``,
``out=`` and the like keep their meaning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator, nullcontext
from typing import Any, TypeVar

from ..errors import ConfigurationError
from ..policy.cast_rules import CastKind
from .engine import active_casting, register_rule
from .tensors import map_tensors, tensors_in
from .wrappers import caster, promoter

F = TypeVar("F", bound=Callable)


def casts_of_calls_disabled() -> AbstractContextManager[Any]:
    """A context in which no calls of this thread are cast, whatever the levels of the live sessions."""
    casting = active_casting()
    return nullcontext() if casting is None else casting.disabled()


class CastsOfCallsDisabled(ContextDecorator):
    """A reusable, reentrant `casts_of_calls_disabled`. torch.compile cannot trace it."""

    def __init__(self) -> None:
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        scope = casts_of_calls_disabled()
        scope.__enter__()
        self._entered.append(scope)

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def half_function(fn: F) -> F:
    """``fn`` with its floating-point tensors, those in containers too, cast to the session's lower precision where calls are cast.

    That is everywhere at O1 and O4, and inside the models at O2, O3 and O5; outside of these where an argument is in lower
    precision already. At O0 and inside `disable_casts` ``fn`` is called as it is. float64 tensors are not cast.

    Raises TypeError for an argument that is no function, as the other decorators do.
    """
    return _decorated(fn, CastKind.LOWER_PRECISION_FP)


def bfloat16_function(fn: F) -> F:
    """``fn`` with its floating-point tensors cast to bfloat16, whatever the session's lower precision is.

    Otherwise as `half_function`.
    """
    return _decorated(fn, CastKind.BFLOAT16)


def float_function(fn: F) -> F:
    """``fn`` with its float16 and bfloat16 tensors cast to float32.

    Otherwise as `half_function`. Its result is not cast.
    """
    return _decorated(fn, CastKind.FP32)


def promote_function(fn: F) -> F:
    """``fn`` with its floating-point tensors cast to the widest dtype among them. Otherwise as `half_function`."""
    return _decorated(fn, CastKind.PROMOTE)


def register_half_function(module: Any, name: str) -> None:
    """Cast the tensors given to ``module.name`` to the session's lower precision, as `half_function` does.

    Before `initialize` or after it. Raises `ConfigurationError` where ``module`` has no such function, and TypeError for a ``name``
    that is no string.
    """
    _register(CastKind.LOWER_PRECISION_FP, module, name)


def register_bfloat16_function(module: Any, name: str) -> None:
    """Cast the tensors given to ``module.name`` to bfloat16; otherwise as `register_half_function`."""
    _register(CastKind.BFLOAT16, module, name)


def register_float_function(module: Any, name: str) -> None:
    """Cast the lower-precision tensors given to ``module.name`` to float32; otherwise as `register_half_function`."""
    _register(CastKind.FP32, module, name)


def register_promote_function(module: Any, name: str) -> None:
    """Cast the tensors given to ``module.name`` to the widest dtype among them; otherwise as `register_half_function`."""
    _register(CastKind.PROMOTE, module, name)


def _decorated(fn: Any, kind: CastKind) -> Any:
    if isinstance(fn, (staticmethod, classmethod)):
        return type(fn)(_decorated(fn.__func__, kind))
    if not callable(fn):
        raise TypeError(
            f"Expected a function to cast the arguments of, found {fn!r}. To name one, use register_half_function."
        )
    label = getattr(fn, "__name__", type(fn).__name__)

    @functools.wraps(fn)
    def cast_and_call(*args: Any, **kwargs: Any) -> Any:
        casting = active_casting()
        if casting is None:
            return fn(*args, **kwargs)
        region = nullcontext() if casting.is_on() else casting.region_for(tensors_in(args, kwargs))
        if region is None:
            return fn(*args, **kwargs)
        with region:
            if kind is CastKind.PROMOTE:
                cast = promoter(casting, label, args, kwargs)
            else:
                other = casting.other_precision() if kind is CastKind.LOWER_PRECISION_FP else None
                cast = caster(kind, casting, label, dtype=other)
            if cast is not None:
                args, kwargs = map_tensors(args, cast), map_tensors(kwargs, cast)
        return fn(*args, **kwargs)

    return cast_and_call


def _register(kind: CastKind, module: Any, name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(
            f"Expected the name of a function as the second argument, found {name!r}: register_half_function(module, 'name')."
        )
    function = module.get(name) if isinstance(module, dict) else getattr(module, name, None)
    if not callable(function):
        label = "the dict" if isinstance(module, dict) else getattr(module, "__name__", repr(module))
        raise ConfigurationError(
            f"There is no function {name!r} in {label}. Register the object that holds it, with the name it has there: "
            f"register_float_function(torch.nn.functional, 'gelu')."
        )
    register_rule(kind, module, name)
