"""The reason why a call computes in its dtype: ``float32: row "softmax" of the tables``, ``float32: promoted by parameter 'bias'``.

It is derived from the policy of the engine, wrappers of ampkit in the Python stack, regions of torch.autocast with their lines,
``keep_fp32=`` of live sessions, and dtypes of the arguments.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.amp import autocast_mode

from ...casting import state
from ...casting.engine import Casting, active_casting
from ...dtypes import CASTABLE, LOWER_PRECISION
from ...models.keep_fp32 import Kept
from ...patching import PatchSet
from ...policy import CastKind
from ...policy.tables import CPU_LIST, CUDA_LIST
from ...registry import live_sessions
from ..sites import Site, look
from ..watching import Call

_DECIDING = (CastKind.LOWER_PRECISION_FP, CastKind.BFLOAT16, CastKind.FP32, CastKind.FP32_WEIGHTS, CastKind.CONTRACTION)
_LISTS = (*CUDA_LIST, *CPU_LIST)
_IN_AUTOCAST = {name: group.kind for group in _LISTS for name in group.names if group.kind in _DECIDING}
#: Dtypes that no level casts.
EXACT = (torch.float64, torch.complex64, torch.complex128)
#: The origin of a row of the policy in words, by its reason.
_TABLES = {"changed by the caller's policy": "policy=", "registered by the user": "a register_ function"}


class Region(NamedTuple):
    """A region of torch.autocast, or ampkit's own around a forward, and the line that begins it."""

    enabled: bool
    dtype: torch.dtype | None  # of torch.autocast
    site: Site | None


class Regions:
    """A stack of regions per thread: ``innermost`` is the current one, from `watch` to the end of ``patches``."""

    def __init__(self) -> None:
        self._by_thread = defaultdict[int, list[Region]](list)

    def watch(self, patches: PatchSet) -> None:
        for owner in (autocast_mode.autocast, state.Region):
            patches.put_around(owner, "__enter__", self._enter)
            patches.put_around(owner, "__exit__", self._leave)

    @property
    def innermost(self) -> Region | None:
        return next(reversed(self._by_thread[threading.get_ident()]), None)

    def _enter(self, original: Any, region: Any) -> Any:
        entered = Region(region._enabled, getattr(region, "fast_dtype", None), look()[0])
        self._by_thread[threading.get_ident()].append(entered)
        return original(region)

    def _leave(self, original: Any, *error: Any) -> Any:
        if regions := self._by_thread[threading.get_ident()]:  # empty if the region began before the watch
            regions.pop()
        return original(*error)


class Argument(NamedTuple):
    """A floating-point argument of a call before casts: its dtype, and its name (``parameter 'bias'``, ``model.py:31``)."""

    dtype: torch.dtype
    name: str


def reason_of(
    call: Call, dtype: torch.dtype, arguments: Sequence[Argument], running: Iterable[nn.Module], region: Region | None
) -> str:
    """Return the reason why the function of a call computes in ``dtype``, inside of ``running`` modules and the region."""
    if dtype in EXACT:
        return "as given"
    engine = active_casting()
    is_on = _is_cast_here(engine, region)
    rule, name = _rule(engine, call.function), call.function.rpartition(".")[2]
    is_wrapped = "casting" in call.passed
    decides = is_on and rule is not None and rule.kind in _DECIDING
    mixed = len({arg.dtype for arg in arguments if arg.dtype in CASTABLE}) > 1
    was_cast = any(arg.dtype is not dtype for arg in arguments)
    if decides and is_wrapped and (rule.kind is not CastKind.CONTRACTION or was_cast or not mixed):
        return f'row "{name}" of {_TABLES.get(rule.reason, "the tables")}'
    if not arguments:
        return "as given"
    if isinstance(call.kwargs.get("dtype"), torch.dtype):
        return "dtype= at the call"
    if kept := _kept_by(running):
        return f"kept by keep_fp32={kept}"
    if region is not None and not region.enabled and dtype is torch.float32 and not mixed:
        return f"region at {region.site}" if region.site else "a region without casts"
    if decides and not mixed and not is_wrapped:
        by = ", cast by torch.autocast's list" if was_cast or dtype in LOWER_PRECISION else ""
        return f"bound before initialize{by}"
    of_autocast = _IN_AUTOCAST.get(name)
    is_as_listed = of_autocast is not None and (of_autocast is CastKind.FP32) == (dtype is torch.float32)
    if engine is None and was_cast and is_as_listed:
        return "torch.autocast's list" + (f", region at {region.site}" if region and region.site else "")
    if mixed and dtype not in LOWER_PRECISION:
        widest = next((arg for arg in arguments if arg.dtype is dtype), None)
        return f"promoted by {widest.name}" if widest is not None and widest.name else "promoted by an argument"
    return "cast inside of it" if was_cast and not mixed else "as given"


def _is_cast_here(engine: Casting | None, region: Region | None) -> bool:
    """Whether casts are on for the call. torch.autocast's own state does not tell: it is off inside of an operator."""
    if engine is None or region is not None:
        return engine is not None and region.enabled
    return engine.scope == "process" and not engine.leaves_out_this_thread


def _rule(engine: Casting | None, function: str) -> Any:
    if engine is None:
        return None
    by_name = {f"{_name_of(rule.owner)}.{rule.name}": rule for rule in engine.rules()}
    name = function.rpartition(".")[2]
    return next((by_name[one] for one in (function, f"torch.{name}", f"torch.Tensor.{name}") if one in by_name), None)


def _kept_by(running: Iterable[nn.Module]) -> str | None:
    """Return the item of ``keep_fp32=`` that keeps a running module in float32, as code; None if there is none."""
    of_models = ((x, item, model) for x in live_sessions for item in x.plan.keep_fp32 for model in x.models)
    for x, item, model in of_models:
        if not set(running).isdisjoint(Kept(model, replace(x.plan, keep_fp32=(item,))).in_float32()):
            return repr(item) if isinstance(item, str) else _name_of(item)
    return None


def _name_of(owner: Any) -> str:
    if owner is torch.Tensor:
        return "torch.Tensor"
    return getattr(owner, "__name__", None) or type(owner).__name__
