"""``apex.amp.wrap``: casts around single functions, until the casts of the handle end.

In Apex each function wrote a wrapper of its own; here each names the rule, and the core's engine wraps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...casting.engine import active_casting
from ...policy.cast_rules import CastKind
from . import utils

_KIND_OF_CAST = {
    utils.maybe_half: CastKind.LOWER_PRECISION_FP,
    utils.maybe_bfloat16: CastKind.BFLOAT16,
    utils.maybe_float: CastKind.FP32,
}


def make_cast_wrapper(orig_fn: Callable, cast_fn: Callable, handle: Any, try_caching: bool = False) -> Callable:
    """Wrap ``orig_fn`` to cast its tensors by ``cast_fn`` while ``handle`` is active."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not handle.is_active():
            return orig_fn(*args, **kwargs)
        return orig_fn(*utils.casted_args(cast_fn, args, kwargs), **kwargs)

    return wrapper


def cached_cast(
    mod: Any, fn: str, cast_fn: Callable, handle: Any, try_caching: bool = False, verbose: bool = False
) -> None:
    """Cast the tensors given to ``mod.fn`` by `utils.maybe_half`, `utils.maybe_float` or another function."""
    if cast_fn in _KIND_OF_CAST:
        _register(_KIND_OF_CAST[cast_fn], mod, fn)
    elif utils.has_func(mod, fn):
        utils.set_func_save(handle, mod, fn, make_cast_wrapper(utils.get_func(mod, fn), cast_fn, handle, try_caching))


def promote(mod: Any, fn: str, handle: Any, verbose: bool = False) -> None:
    """Cast all tensors given to ``mod.fn`` to the widest type among them."""
    _register(CastKind.PROMOTE, mod, fn)


def sequence_promote(mod: Any, fn: str, handle: Any, verbose: bool = False) -> None:
    """Cast the tensors in a sequence given to ``mod.fn`` to the widest type among them."""
    _register(CastKind.PROMOTE, mod, fn)


def promote_match_arg0(mod: Any, fn: str, handle: Any, verbose: bool = False) -> None:
    """Cast the other tensors given to ``mod.fn`` to the type of the first."""
    _register(CastKind.MATCH_FIRST, mod, fn)


def err_if_any_half(mod: Any, fn: str, handle: Any, custom_err_msg: str | None = None) -> None:
    """Refuse lower precision for ``mod.fn``."""
    _register(CastKind.BANNED, mod, fn)


def err_if_arg0_half(mod: Any, fn: str, handle: Any, verbose: bool = False) -> None:
    """Refuse float16 for the first argument of ``mod.fn``."""
    _register(CastKind.REJECT, mod, fn)


def _register(kind: CastKind, mod: Any, fn: str) -> None:
    casting = active_casting()
    if casting is not None and utils.has_func(mod, fn):
        casting.register(kind, mod, fn)
