"""`observe` runs a script under an observer; `culprit_of` is the cause of its exception, if that is precision."""

from __future__ import annotations

import argparse
import sys
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..dtypes import LOWER_PRECISION
from ..scripts import running
from .finder import Culprit, Finder
from .sites import hide_observers
from .watching import Call, Enough
from .words import short

_LEAST = {"iterations": 1, "skip": 0, "after": 1}


def observe(arguments: argparse.Namespace, watch: AbstractContextManager[Any]) -> tuple[int, BaseException | None]:
    """Run the script to its end, or until the watch raises `Enough`; return the exit code and the exception of the script.

    Raise that exception again after printing; its traceback has no frames of observers. Compiled code runs eagerly.
    """
    for name, least in _LEAST.items():
        if (value := vars(arguments).get(name, least)) < least:
            words = f"--{name} {value} is not accepted: expected at least {least}."
            print(f"ampkit {arguments.command}: {words}", file=sys.stderr)
            return 2, None
    hook = sys.excepthook
    try:
        with torch.compiler.set_stance("force_eager"), watch:
            return running.from_command_line(arguments), None
    except Enough:
        sys.excepthook = hook
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            hide_observers(error)
            return 1, error
    return 0, None


# The script's exception


def culprit_of(error: Exception, watch: Finder) -> tuple[Culprit, tuple[str, ...]] | None:
    """Return the culprit and its cure; None if the exception has another cause."""
    call, failed = watch.failed or (None, None)
    if call is None or failed is not error or (cause := _two_dtypes(call, watch) or _too_large(call, error)) is None:
        return None
    kind, text, cure, dtype = cause
    return Culprit(kind, text, **call.where(), dtype=dtype), (cure,)


def _two_dtypes(call: Call, watch: Finder) -> Any:
    inputs = [x for x in call.inputs() if x.is_floating_point()]
    odd = next((x for x in inputs if x.dtype is not inputs[0].dtype and x.dim()), None)
    if odd is None:
        return None
    words = [f"{short(x.dtype)} {tuple(x.shape)}{f' ({name})' if (name := watch.name_of(x)) else ''}" for x in inputs]
    text = f"its arguments are {', '.join(words)}"
    return "two dtypes in one call", text, "convert one beside the call, x.to(y.dtype)", odd.dtype


def _too_large(call: Call, error: Exception) -> Any:
    if "without overflow" not in str(error):
        return None
    dtype = next((x.dtype for x in call.inputs() if x.dtype in LOWER_PRECISION), torch.float32)
    numbers = [float(x) for x in tree_leaves((call.args, call.kwargs)) if isinstance(x, (int, float))]
    largest = max(numbers, key=abs, default=float("nan"))
    text = f"{largest:g} in a call in {short(dtype)}, which ends at {torch.finfo(dtype).max:.6g}"
    return "a value that does not fit", text, "write torch.finfo(x.dtype).min, or .max, in its place", dtype
