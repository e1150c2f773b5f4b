"""`culprit_of`: what an exception of a script comes from, where precision is the cause: two dtypes in a call, and the like."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..dtypes import LOWER_PRECISION
from .cures import Cure
from .finder import Culprit, Finder
from .sites import look_at
from .watching import Call
from .words import short

#: By what the message says: the kind, and the cure.
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


def in_words(error: BaseException) -> str:
    """The kind and the cure of an exception whose message tells both; else empty."""
    return next((f"{kind}: {cure}" for words, kind, cure in _BY_MESSAGE if words in str(error)), "")


def culprit_of(error: Exception, watch: Finder) -> tuple[Culprit, tuple[Cure, ...]] | None:
    """The culprit and its cure; None where the exception is about something else."""
    message, (call, failed) = str(error), watch.failed or (None, None)
    dtypes = None if call is None else _two_dtypes(call, watch)
    for words, kind, cure in _BY_MESSAGE:
        if words in message:
            first = next(iter(re.findall(r"^RuntimeError: (.+)", message, re.M)), message.strip().splitlines()[0])
            text = dtypes[1] if dtypes else first
            return Culprit(kind, text, torch.float32, site=look_at(error.__traceback__)), (Cure(cure),)
    if call is None or failed is not error or (found := dtypes or _too_large(call, message)) is None:
        return None
    kind, text, cure, dtype = found
    return Culprit(kind, text, **call.where(), dtype=dtype), (Cure(cure),)


def _two_dtypes(call: Call, watch: Finder) -> Any:
    given = [one for one in call.inputs() if one.is_floating_point()]
    odd = next((one for one in given if one.dtype is not given[0].dtype and one.dim()), None)
    if odd is None:
        return None
    names = {
        param: f"{type(module).__name__}'s {name!r}"
        for module in list(watch.modules)
        for name, param in module.named_parameters(recurse=False)
    }
    words = [f"{short(one.dtype)} {tuple(one.shape)}{_named(names, one)}" for one in given]
    text = f"its arguments are {', '.join(words)}"
    if any(one.element_size() < 2 for one in given):
        cure = "no operator takes them beside others: w.to(x.dtype) before the call"
        return "weights of one byte", text, cure, odd.dtype
    frozen = [one for one in given if one in names and not one.requires_grad]
    if frozen:
        lower = next((one for one in frozen if one.dtype in LOWER_PRECISION), frozen[0])
        cure = "call it with x.to(its dtype), under torch.autocast, or give it to initialize() beside the model"
        return "a frozen model in another precision", text, cure, lower.dtype
    return "two dtypes in one call", text, "convert one beside the call, x.to(y.dtype)", odd.dtype


def _named(names: Any, tensor: torch.Tensor) -> str:
    owner = names.get(tensor, names.get(tensor._base) if tensor._is_view() else None)
    return f" ({owner})" if owner else ""


def _too_large(call: Call, message: str) -> Any:
    if "without overflow" not in message:
        return None
    dtype = next((one.dtype for one in call.inputs() if one.dtype in LOWER_PRECISION), torch.float32)
    numbers = [float(one) for one in tree_leaves((call.args, call.kwargs)) if isinstance(one, (int, float))]
    largest = max(numbers, key=abs, default=float("nan"))
    text = f"{largest:g} in a call in {short(dtype)}, which ends at {torch.finfo(dtype).max:.6g}"
    return "a value that does not fit", text, "write torch.finfo(x.dtype).min, or .max, in its place", dtype
