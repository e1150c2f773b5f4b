"""Work that accompanies compiled code, and helpers for code that dynamo traces.

A graph of torch.compile holds what Python did while it was traced, which the work of an initialized model before each forward
must not be: `compiled_models` runs it before compiled code instead ("Loans and compiled code" in NOTES.md).
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from .patching import PatchSet

_P, _R = ParamSpec("_P"), TypeVar("_R")
_compiling = torch.compiler.is_dynamo_compiling


def uncompiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function that is no part of a graph: in compiled code the graph ends there, and the function runs as elsewhere.

    Blocks, backward passes and steps, which every iteration has, write the condition themselves: a call less for each.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        run = torch._dynamo.disable(function) if _compiling() else function
        return run(*args, **kwargs)

    return call


def forget_traces() -> None:
    """Make torch retrace compiled functions: their graphs hold the casts of the first trace, and do not see them change."""
    if is_compiling_here():
        compiled_models.before_each_call(forget_traces)
    elif "torch._dynamo" in sys.modules:
        compiled_models.not_before_calls(forget_traces)
        torch.compiler.reset()


def is_compiling_here() -> bool:
    """Whether dynamo compiles in this thread; its work in progress and its compiled code must not be discarded then."""
    return torch._guards.CompileContext.try_get() is not None


class CompiledModels:
    """The initialized models whose forward is in compiled code, and the actions that run before that code.

    Every call of a compiled function or module, whenever it was compiled, asks ``_callback_from_stance`` what to do with
    the frames that follow; the actions run there. When one raises, the call is left uncompiled: the model's own forward
    then raises the same error, and nothing of dynamo's is left half set up.
    """

    def __init__(self) -> None:
        #: By the action itself, or by a reference to the model or session that it belongs to.
        self._before_calls: dict[Any, Callable[[], Any]] = {}
        self._patches = PatchSet()
        self._is_watching = False

    def not_before_calls(self, action: Any) -> None:
        """Undo `before_each_call`, or `note` by a reference to its model."""
        self._before_calls.pop(action, None)
        if not self._before_calls:
            self._patches.restore()
            self._is_watching = False

    def note(self, model: nn.Module, before_forward: Callable[[nn.Module], None]) -> None:
        """Call ``before_forward(model)`` now, in a trace through the model's forward, and before each compiled call."""
        before_forward(model)
        ref = weakref.ref(model, self.not_before_calls)
        self.before_each_call(lambda: (alive := ref()) is None or before_forward(alive), ref)

    def before_each_call(self, action: Callable[[], Any], key: Any = None) -> None:
        """Run ``action()`` in the thread of each compiled call, before dynamo checks its guards."""
        self._before_calls[key or action] = action
        # Where no optimizer has loaded dynamo yet, the first trace through a model comes here again.
        if not self._is_watching and "torch._dynamo" in sys.modules:
            self._patches.put_around(torch._dynamo.eval_frame, "_callback_from_stance", self._choose_callback)
            self._is_watching = True

    def _choose_callback(self, original: Callable[[Any], Any], callback: Any) -> Any:
        if callback is not None and callback is not False:
            try:
                for action in tuple(self._before_calls.values()):
                    action()
            except Exception:
                return None
        return original(callback)


compiled_models = CompiledModels()
