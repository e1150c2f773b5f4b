"""When an optimizer steps, and with that where an iteration ends: at every level, under torch's GradScaler, and without either."""

from __future__ import annotations

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

    ``scales`` are those of `scale_loss` blocks and of torch's GradScaler, in order. Iterations are counted by the optimizer that
    steps first: ``on_step`` is called after each step, with the number of the one that it ends, or None where it ends none.
    """

    def __init__(self, on_step: Callable[[int | None], None]) -> None:
        self.on_step = on_step
        self.begun = 0  # steps of all optimizers
        self.scales: list[float | torch.Tensor] = []
        self.counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._first: Callable[[], Any] = lambda: None
        self._stepping: Any = None

    @property
    def is_stepping(self) -> bool:
        return self._stepping is not None

    def before(self, optimizer: Any) -> None:
        """A step begins."""

    def after(self, optimizer: Any, skipped: bool) -> None:
        """It was taken, or skipped."""

    @property
    def iterations(self) -> int:
        return max(self.counts.values(), default=0)

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
            self._stepping = outer
            if outer is None:
                self._begin(optimizer)
            return result

        return ((args[0], evaluate, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": evaluate})

    def _begin(self, optimizer: Any) -> None:
        if self._stepping not in (None, optimizer):  # a part of the step of another optimizer
            return
        self._stepping = optimizer
        self.begun += 1
        self.counts[optimizer] = self.counts.get(optimizer, 0) + 1
        if self._first() is None:
            self._first = weakref.ref(optimizer)
        with unwatched(), torch.no_grad():
            self.before(optimizer)

    def _end(self, optimizer: Any, skipped: bool = False) -> None:
        if self._stepping is not optimizer:
            return
        self._stepping = None
        with unwatched(), torch.no_grad():
            self.after(optimizer, skipped)
        is_first = optimizer is self._first()
        if is_first:
            self.scales.clear()
        self.on_step(self.counts[optimizer] if is_first else None)

    def _on_skip(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def skip(wrapper: OptimizerWrapper) -> Any:
            self._begin(wrapper.optimizer)
            original(wrapper)
            self._end(wrapper.optimizer, skipped=True)

        return skip

    def _on_block_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __exit__(block: Block, *error: Any) -> Any:
            scale = block.scale  # it moves when the block ends
            with unwatched():
                self.scales.append(scale.clone() if isinstance(scale, torch.Tensor) else scale)
            return original(block, *error)

        return __exit__

    def _on_grad_scaler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            with unwatched():
                if scaler._scale is not None:
                    self.scales.append(scaler._scale.clone())
            count = self.counts.get(optimizer, 0)
            result = original(scaler, optimizer, *args, **kwargs)
            if self.counts.get(optimizer, 0) == count:  # it did not call the optimizer
                self._begin(optimizer)
                self._end(optimizer, skipped=True)
            return result

        return step
