"""What happens in an iteration, told to whoever listens: forwards, `scale_loss` blocks, backward passes, steps of optimizers.

The core calls the functions below where `listeners` is not empty. What torch does by itself is told by hooks and patches that are
in place while somebody listens: `forwards` and `steps` here, ``calls_of_torch`` of the core for backward passes. ampkit.insight
listens.
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

#: Asked in every iteration of the core; empty unless `listening`.
listeners: list[Listener] = []
if hasattr(os, "register_at_fork"):  # a child is no part of what is watched
    os.register_at_fork(after_in_child=listeners.clear)


class Listener:
    """Subclasses replace what they want to hear of. A passing exception ends what it is raised through, without a word here."""

    def forward_begins(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """Of any module, in any thread, a part of others or not."""

    def forward_ends(self, module: torch.nn.Module) -> None: ...

    def block_begins(self, loss: torch.Tensor, scaler: Any) -> Any:
        """A `scale_loss` block, or ``scale`` of torch's GradScaler. A context manager that is returned stands in its place."""

    def backward_begins(self, roots: Sequence[Any]) -> None:
        """The outermost pass: not those that torch.utils.checkpoint runs inside of it."""

    def backward_ends(self) -> None: ...

    def step_begins(self, optimizer: Any) -> None:
        """After a closure was evaluated. Steps inside of a step, of the optimizers that it is made of, are not told of."""

    def step_ends(self, optimizer: Any, skipped: bool) -> None: ...


@contextmanager
def listening(listener: Listener, *shared: SharedPatches) -> Iterator[None]:
    """Tell a listener of what happens inside. ``shared`` are the sources that it needs, patched before what it patches itself."""
    with Undo() as undo:
        for one in shared:
            one.acquire()
            undo.callback(one.release)
        listeners.append(listener)
        undo.callback(listeners.remove, listener)
        yield


def tell(event: str, *what: Any) -> Any:
    """Call this method of all listeners, and return the last answer."""
    answer = None
    for one in tuple(listeners):
        answer = getattr(one, event)(*what) or answer
    return answer


def telling(backward: Callable[..., None], roots: Sequence[Any]) -> Callable[..., None]:
    """Tell that a backward pass begins. What is returned runs it, and tells of its end."""
    tell("backward_begins", roots)

    def run(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        tell("backward_ends")

    return run


# Steps


class _Step(threading.local):
    """The step that runs in this thread: its optimizer, the depth of the stack where it began, and whether the core told of it."""

    optimizer: Any = None
    depth = begun = 0
    by_core = False


_step = _Step()


def is_stepping() -> bool:
    """Whether a step runs in this thread, and not its closure."""
    return _step.optimizer is not None


def begin_step(optimizer: Any, by_core: bool = True) -> None:
    """Tell of a step. One inside of another, or of the class that it extends, is a part of it.

    One that is no deeper than the last, which has not ended, comes after an exception.
    """
    depth = len(list(walk_stack(sys._getframe())))
    if _step.optimizer is None or depth <= _step.depth:
        _step.optimizer, _step.depth, _step.by_core = optimizer, depth, by_core
        _step.begun += 1
        tell("step_begins", optimizer)


def end_step(optimizer: Any, skipped: bool = False, by_core: bool = True) -> None:
    """It was taken, or ``skipped``; one that was skipped may not have begun."""
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
    """What stands in the place of ``GradScaler.scale``."""
    if not scaler.is_enabled():
        return original(scaler, outputs)
    if not isinstance(outputs, torch.Tensor):
        return type(outputs)(_scale(original, scaler, output) for output in outputs)
    if (stand_in := tell("block_begins", outputs, scaler)) is None:
        return original(scaler, outputs)
    with stand_in as scaled:
        return scaled


def _step_unless_skipped(original: Callable, scaler: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """What stands in the place of ``GradScaler.step``, which leaves out the optimizer's where gradients are not finite."""
    begun = _step.begun
    result = original(scaler, optimizer, *args, **kwargs)
    if _step.begun == begun:
        end_step(optimizer, skipped=True)
    return result


# What torch does by itself

_NAME = "ampkit"  # of our hooks among torch's, which have numbers


def _hook_forwards(patches: PatchSet) -> None:
    of_all = sys.modules["torch.nn.modules.module"]
    patches.set(of_all._global_forward_pre_hooks, _NAME, lambda *what: tell("forward_begins", *what))
    patches.set(of_all._global_forward_hooks, _NAME, lambda module, *_: tell("forward_ends", module))
    patches.set(of_all._global_forward_hooks_always_called, _NAME, True)


def _hook_steps(patches: PatchSet) -> None:
    of_all = sys.modules["torch.optim.optimizer"]
    patches.set(of_all._global_optimizer_pre_hooks, _NAME, _begin_step_of_torch)
    patches.set(of_all._global_optimizer_post_hooks, _NAME, lambda optimizer, *_: end_step(optimizer, by_core=False))
    patches.put_around(GradScaler, "scale", _scale)
    patches.put_around(GradScaler, "step", _step_unless_skipped)


#: Sources for `listening`.
forwards, steps = SharedPatches(_hook_forwards), SharedPatches(_hook_steps)
