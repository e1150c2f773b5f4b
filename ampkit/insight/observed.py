"""`observe` runs a script under an observer; `culprit_of` is the cause of its exception, if that is precision."""

from __future__ import annotations

import argparse
import re
import sys
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..dtypes import LOWER_PRECISION
from ..scripts import running
from .diagnose import Cure
from .finder import Culprit, Finder
from .sites import hide_observers, look_at
from .watching import Call, Enough
from .words import short

_LEAST = {"iterations": 1, "skip": 0, "after": 1}
#: A part of the message, the kind, and the cure.
_BY_MESSAGE = (
    (
        "No inf checks were recorded",
        "an optimizer without gradients",
        "no backward pass has reached its parameters: make it last, over model.parameters() of the model that the loss comes from",
    ),
    (
        "running_mean or running_var, which will be updated in place",
        "batch norm under vmap",
        "torch.func.replace_all_batch_norm_modules_(model), or nn.BatchNorm(track_running_stats=False): it writes to statistics",
    ),
    (
        "TorchScript interpreter",
        "a traced function",
        "a trace keeps the dtypes of its example: trace it with what it is called with, at the level and inside of the casts",
    ),
)


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


def in_words(error: BaseException) -> str:
    """Return the kind and the cure of an exception with a known message; else an empty string."""
    return next((f"{kind}: {cure}" for words, kind, cure in _BY_MESSAGE if words in str(error)), "")


def culprit_of(error: Exception, watch: Finder) -> tuple[Culprit, tuple[Cure, ...]] | None:
    """Return the culprit and its cure; None if the exception has another cause."""
    message, (call, failed) = str(error), watch.failed or (None, None)
    dtypes = None if call is None else _two_dtypes(call, watch)
    for words, kind, cure in _BY_MESSAGE:
        if words in message:
            first = next(iter(re.findall(r"^RuntimeError: (.+)", message, re.M)), message.strip().splitlines()[0])
            text = dtypes[1] if dtypes else first
            return Culprit(kind, text, torch.float32, site=look_at(error.__traceback__)), (Cure(cure),)
    if call is None or failed is not error or (cause := dtypes or _too_large(call, message)) is None:
        return None
    kind, text, cure, dtype = cause
    return Culprit(kind, text, **call.where(), dtype=dtype), (Cure(cure),)


def _two_dtypes(call: Call, watch: Finder) -> Any:
    inputs = [x for x in call.inputs() if x.is_floating_point()]
    odd = next((x for x in inputs if x.dtype is not inputs[0].dtype and x.dim()), None)
    if odd is None:
        return None
    names = {
        param: f"{type(module).__name__}'s {name!r}"
        for module in list(watch.modules)
        for name, param in module.named_parameters(recurse=False)
    }
    words = [f"{short(x.dtype)} {tuple(x.shape)}{_named(names, x)}" for x in inputs]
    text = f"its arguments are {', '.join(words)}"
    if any(x.element_size() < 2 for x in inputs):
        cure = "no operator takes them beside others: w.to(x.dtype) before the call"
        return "weights of one byte", text, cure, odd.dtype
    frozen = [x for x in inputs if x in names and not x.requires_grad]
    if frozen:
        lower = next((x for x in frozen if x.dtype in LOWER_PRECISION), frozen[0])
        cure = "call it with x.to(its dtype), under torch.autocast, or give it to initialize() beside the model"
        return "a frozen model in another precision", text, cure, lower.dtype
    return "two dtypes in one call", text, "convert one beside the call, x.to(y.dtype)", odd.dtype


def _named(names: Any, tensor: torch.Tensor) -> str:
    owner = names.get(tensor, names.get(tensor._base) if tensor._is_view() else None)
    return f" ({owner})" if owner else ""


def _too_large(call: Call, message: str) -> Any:
    if "without overflow" not in message:
        return None
    dtype = next((x.dtype for x in call.inputs() if x.dtype in LOWER_PRECISION), torch.float32)
    numbers = [float(x) for x in tree_leaves((call.args, call.kwargs)) if isinstance(x, (int, float))]
    largest = max(numbers, key=abs, default=float("nan"))
    text = f"{largest:g} in a call in {short(dtype)}, which ends at {torch.finfo(dtype).max:.6g}"
    return "a value that does not fit", text, "write torch.finfo(x.dtype).min, or .max, in its place", dtype
