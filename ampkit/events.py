"""Events of an iteration for listeners: forwards, `scale_loss` blocks, backward passes, steps of optimizers.

The core calls the functions below where `listeners` is not empty. Hooks and patches report what torch does by itself: `forwards`
and `steps` here, ``calls_of_torch`` of the core for backward passes.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from traceback import walk_stack
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from .patching import PatchSet, SharedPatches, Undo

#: Read in every iteration of the core; empty unless `listening`.
listeners: list[Listener] = []
if hasattr(os, "register_at_fork"):  # a child is no part of what is watched
    os.register_at_fork(after_in_child=listeners.clear)


class Listener:
    """The base of listeners, which override the events that they need. After an exception only forwards have an ``..._ends``."""

    def forward_begins(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """Handle the start of a forward, of any module or submodule, in any thread."""

    def forward_ends(self, module: torch.nn.Module) -> None: ...

    def block_begins(self, loss: torch.Tensor, scaler: Any) -> Any:
        """Handle the start of a `scale_loss` block, or of ``GradScaler.scale``. A context manager that is returned replaces it."""

    def backward_begins(self, roots: Sequence[Any]) -> None:
        """Handle the start of an outermost backward pass, not of those that torch.utils.checkpoint runs inside of it."""

    def backward_ends(self) -> None: ...

    def step_begins(self, optimizer: Any) -> None:
        """Handle the start of a step, after its closure was evaluated. Steps of optimizers inside of that step are left out."""

    def step_ends(self, optimizer: Any, skipped: bool) -> None: ...


@contextmanager
def listening(listener: Listener, *shared: SharedPatches) -> Iterator[None]:
    """Register a listener inside of the block. ``shared`` are the sources that it needs, patched before its own patches."""
    with Undo() as undo:
        for source in shared:
            source.acquire(undo)
        listeners.append(listener)
        undo.callback(listeners.remove, listener)
        yield


def tell(event: str, *args: Any) -> Any:
    """Call this method of all listeners, and return the last answer."""
    answer = None
    for listener in tuple(listeners):
        answer = getattr(listener, event)(*args) or answer
    return answer


# Steps


class _Step(threading.local):
    """The step that runs in this thread: its optimizer, the depth of the stack where it began, and whether the core reported it."""

    optimizer: Any = None
    depth = begun = 0
    by_core = False


_step = _Step()


def is_stepping() -> bool:
    """Whether a step runs in this thread, and not its closure."""
    return _step.optimizer is not None


def begin_step(optimizer: Any, by_core: bool = True) -> None:
    """Report that a step begins. A step inside of another, or of the class that it extends, is a part of it.

    Where the last step has not ended and the new one is no deeper in the stack, an exception has ended the last.
    """
    depth = len(list(walk_stack(sys._getframe())))
    if _step.optimizer is None or depth <= _step.depth:
        _step.begun += 1
        tell("step_begins", optimizer)  # which may raise: then no step runs
        _step.optimizer, _step.depth, _step.by_core = optimizer, depth, by_core


def end_step(optimizer: Any, skipped: bool = False, by_core: bool = True) -> None:
    """Report that a step has ended. A step that was ``skipped`` may not have begun."""
    if skipped and _step.optimizer is None:
        begin_step(optimizer)
    if _step.optimizer is optimizer and _step.by_core is by_core:
        _step.optimizer = None
        tell("step_ends", optimizer, skipped)


def _begin_step_of_torch(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        return begin_step(optimizer, by_core=False)

    def evaluate() -> Any:
        outer, _step.optimizer = _step.optimizer, None  # forward and backward are no part of the step
        result = closure()
        if outer is not None:
            _step.optimizer = outer
        elif _step.optimizer is None:
            begin_step(optimizer, by_core=False)
        return result

    return ((args[0], evaluate, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": evaluate})


def _scale(original: Callable, scaler: GradScaler, outputs: Any) -> Any:
    """Wrap ``GradScaler.scale``, reported as the start of a block."""
    if not scaler.is_enabled():
        return original(scaler, outputs)
    if not isinstance(outputs, torch.Tensor):
        return type(outputs)(_scale(original, scaler, output) for output in outputs)
    if (stand_in := tell("block_begins", outputs, scaler)) is None:
        return original(scaler, outputs)
    with stand_in as scaled:
        return scaled


def _step_unless_skipped(original: Callable, scaler: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``GradScaler.step``: report a skipped step where it leaves out the optimizer's, for gradients that are not finite."""
    begun = _step.begun
    result = original(scaler, optimizer, *args, **kwargs)
    if _step.begun == begun:
        end_step(optimizer, skipped=True)
    return result


# Events of torch's own

_NAME = "ampkit"  # the key of ampkit's hooks; torch's keys are numbers


def _hook_forwards(patches: PatchSet) -> None:
    nn_module = sys.modules["torch.nn.modules.module"]
    patches.set(nn_module._global_forward_pre_hooks, _NAME, lambda *args: tell("forward_begins", *args))
    patches.set(nn_module._global_forward_hooks, _NAME, lambda module, *_: tell("forward_ends", module))
    patches.set(nn_module._global_forward_hooks_always_called, _NAME, True)


def _hook_steps(patches: PatchSet) -> None:
    module = sys.modules["torch.optim.optimizer"]
    patches.set(module._global_optimizer_pre_hooks, _NAME, _begin_step_of_torch)
    patches.set(module._global_optimizer_post_hooks, _NAME, lambda optimizer, *_: end_step(optimizer, by_core=False))
    patches.put_around(GradScaler, "scale", _scale)
    patches.put_around(GradScaler, "step", _step_unless_skipped)


#: Sources for `listening`.
forwards, steps = SharedPatches(_hook_forwards), SharedPatches(_hook_steps)
