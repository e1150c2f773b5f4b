"""Labels of what ampkit does in an iteration: ranges in torch.profiler's traces, and in NVTX under ``emit_nvtx()``.

The ranges exist only while a profiler of torch's runs. Otherwise a labelled function only reads torch's own flag.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.autograd import profiler

P = ParamSpec("P")
R = TypeVar("R")

_dynamo_compiling = torch.compiler.is_dynamo_compiling


def labelled(label: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that each call of it is a range ``ampkit: {label}`` while a profiler runs; not in compiled code."""
    name = f"ampkit: {label}"

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            # In this order, since dynamo guards on a flag that it reads.
            if _dynamo_compiling() or not profiler._is_profiler_enabled:
                return function(*args, **kwargs)
            with profiler.record_function(name):
                return function(*args, **kwargs)

        return run

    return decorate
