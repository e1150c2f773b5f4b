"""When an optimizer steps, and with that where an iteration ends: at every level, under torch's GradScaler, and without either."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...iteration.block import Block
from ...iteration.optimizer_wrapper import OptimizerWrapper
from ...patching import PatchSet, Undo
from ..repeating import unwatched


class StepHooks:
    """Calls `before` and `after` around the steps of all optimizers, skipped ones included, from `watch` to the undoing.

    ``scales`` are those of the last `scale_loss` block, or step of torch's GradScaler, of each optimizer; ``scale`` is the latest
    of all. ``iterations`` are counted by the optimizer that steps first: ``on_step`` is called after each step, with the number of
    the one that it ends, or None where it ends none.
    """

    def __init__(self, on_step: Callable[[int | None], None]) -> None:
        self.on_step = on_step
        self.begun = 0  # steps of all optimizers
        self.iterations = 0
        self.scale: float | torch.Tensor = 1.0
        self.scales: weakref.WeakKeyDictionary[Any, float | torch.Tensor] = weakref.WeakKeyDictionary()
        self.counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._first: Callable[[], Any] = lambda: None
        self._stepping: Any = None
        self._depth = 0  # of the stack, where that step began

    @property
    def is_stepping(self) -> bool:
        return self._stepping is not None

    def before(self, optimizer: Any) -> None:
        """A step begins."""

    def after(self, optimizer: Any, skipped: bool) -> None:
        """It was taken, or skipped."""

    def watch(self, undo: Undo) -> None:
        patches = PatchSet()
        undo.callback(patches.restore)
        undo.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        undo.callback(register_optimizer_step_post_hook(lambda optimizer, *_: self._end(optimizer)).remove)
        patches.set(OptimizerWrapper, "skip", self._on_skip(OptimizerWrapper.skip))
        patches.set(Block, "__exit__", self._on_block_end(Block.__exit__))
        patches.set(GradScaler, "step", self._on_grad_scaler(GradScaler.step))

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            return self._begin(optimizer)

        def evaluate() -> Any:
            outer, self._stepping = self._stepping, None  # forward and backward are no part of the step
            result = closure()
            if outer is not None:
                self._stepping = outer
            elif self._stepping is None:
                self._begin(optimizer)
            return result

        return ((args[0], evaluate, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": evaluate})

    def _begin(self, optimizer: Any) -> None:
        depth = _depth_of_stack()
        if (
            self._stepping is not None and depth > self._depth
        ):  # a part of the step of another, or of the class that it extends
            return
        self._stepping, self._depth = optimizer, depth  # one that is no deeper than the last has raised
        self.begun += 1
        self.counts[optimizer] = self.counts.get(optimizer, 0) + 1
        if self._first() is None:
            self._first = weakref.ref(optimizer)
        self.iterations += optimizer is self._first()
        with unwatched(), torch.no_grad():
            self.before(optimizer)

    def _end(self, optimizer: Any, skipped: bool = False) -> None:
        if self._stepping is not optimizer:
            return
        self._stepping = None
        with unwatched(), torch.no_grad():
            self.after(optimizer, skipped)
        self.on_step(self.iterations if optimizer is self._first() else None)

    def _on_skip(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def skip(wrapper: OptimizerWrapper) -> Any:
            self._begin(wrapper.optimizer())
            original(wrapper)
            self._end(wrapper.optimizer(), skipped=True)

        return skip

    def _on_block_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __exit__(block: Block, *error: Any) -> Any:
            scale = block.scale  # it moves when the block ends
            with unwatched():
                self.scale = scale.clone() if isinstance(scale, torch.Tensor) else scale
            self.scales.update((wrapper.optimizer(), self.scale) for wrapper in block.named)
            return original(block, *error)

        return __exit__

    def _on_grad_scaler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            with unwatched():
                if scaler._scale is not None:
                    self.scale = self.scales[optimizer] = scaler._scale.clone()
            count = self.counts.get(optimizer, 0)
            result = original(scaler, optimizer, *args, **kwargs)
            if self.counts.get(optimizer, 0) == count:  # it did not call the optimizer
                self._begin(optimizer)
                self._end(optimizer, skipped=True)
            return result

        return step


def _depth_of_stack() -> int:
    depth, frame = 0, sys._getframe(1)
    while frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    return depth
