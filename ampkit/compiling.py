"""One warning when an initialized model is compiled: O1's casts are Python functions that dynamo may not see through."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from .logs import logger
from .models import watchers
from .patching import PatchSet


class CompileWarning:
    """A wrapper on ``torch.compile``, counted: put there by the first session, taken away by the last."""

    def __init__(self) -> None:
        self._users = 0
        self._patches = PatchSet()

    def acquire(self) -> None:
        self._users += 1
        if self._users == 1:
            self._patches.set(torch, "compile", _warning_compile(torch.compile))

    def release(self) -> None:
        self._users -= 1
        if self._users == 0:
            self._patches.restore()


compile_warning = CompileWarning()


def _warning_compile(original: Any) -> Any:
    warned = []

    @functools.wraps(original)
    def compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        module = getattr(model, "__self__", model)
        if not warned and isinstance(module, nn.Module) and any(inner in watchers for inner in module.modules()):
            warned.append(True)
            logger.warning(
                "torch.compile was given a model initialized by ampkit. Compiled code is not part of ampkit's tests yet: "
                "compare its losses with the uncompiled model's before relying on it."
            )
        return original(model, *args, **kwargs)

    return compile
