"""A repetition of an iteration without side effects: everything the iteration changes is restored, also after an exception.

Restored are tensors that operators write to, gradients, buffers, and the states of random number generators. So no model has to be
copied. A `scale_loss` block only multiplies the loss here. The iteration ends when it unscales, clips or steps.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils._python_dispatch import _disable_current_modes as unwatched

from ..casting.tensors import params_of
from ..events import Listener, listening, steps
from ..iteration.block import calls_of_torch
from ..iteration.optimizer_wrapper import drop_casts
from ..patching import PatchSet
from ..registry import live_sessions, wrapper_of
from .watching import Call, Watch, address, place, tensors_in


class _Ended(BaseException):
    """An exception that ends the iteration after the part that computes gradients."""


class Repetition(Listener):
    """A run of an iteration under ``watch``, at the current loss scale times ``factor``; ``seed`` is the gradient of the loss.

    It reports losses, gradients and models to the watch. ``scale`` is the loss scale that was used last, None without one; a
    dynamic one has a ``backoff`` factor and a ``floor``.
    """

    def __init__(self, watch: Watch, factor: float = 1.0, seed: float = 1.0) -> None:
        self.factor, self.seed, self.floor = factor, seed, 2.0**-14
        self.scale: float | None = None
        self.backoff: float | None = None
        self._watch = watch
        self._has_run_backward = False
        self._undo = PatchSet()
        self._params: dict[torch.Tensor, None] = {}  # whose gradients are removed
        self._modules: set[nn.Module] = set()
        self._made: set[int] = set()  # addresses of tensors that are made in the iteration
        self._copied: set[tuple[Any, ...]] = set()  # places of tensors that are copied

    def run(self, iteration: Callable[[], Any]) -> Repetition:
        with self._undo as undo:
            drop_casts()
            undo.callback(drop_casts)
            undo.enter_context(torch.random.fork_rng())
            undo.callback(random.setstate, random.getstate())
            if numpy := sys.modules.get("numpy"):
                undo.callback(numpy.random.set_state, numpy.random.get_state())
            self._take_over(undo)
            with contextlib.suppress(_Ended), self._watch:
                result = iteration()
                if not self._has_run_backward:
                    with unwatched():
                        self._watch.on_loss(tensors_in(result))
        return self

    def keep(self, param: torch.Tensor) -> None:
        """Remove the gradient of a leaf until the end of the run."""
        if param not in self._params:
            self._params[param] = None
            self._undo.callback(setattr, param, "grad", param.grad)
            param.grad = None

    def keep_all(self, module: nn.Module) -> None:
        """Remove the gradients of a module and its submodules until the end; their buffers are restored too."""
        if module in self._modules:
            return
        self._modules.update(module.modules())
        for param in module.parameters():
            self.keep(param)
        for part in module.modules():
            for name, buffer in part._buffers.items():
                self._undo.callback(part._buffers.__setitem__, name, buffer)

    def _around(self, original: Callable[[Call], Any], call: Call) -> Any:
        """Run an operator. A tensor that it writes to is copied before, unless it was made in the iteration."""
        for tensor in call.inputs():
            if tensor.requires_grad and tensor.is_leaf:
                self.keep(tensor)
        for tensor in call.written():
            where = place(tensor)
            if where[0] not in self._made and where not in self._copied:
                self._copied.add(where)
                # The latest is undone first: of two copies of the same memory, the earlier counts.
                self._undo.callback(tensor.detach().copy_, tensor.detach().clone())
        out = original(call)
        if not call.op._schema.is_mutable and not call.op.is_view:
            self._made.update(map(address, tensors_in(out)))
        return out

    def _take_over(self, patches: PatchSet) -> None:
        patches.enter_context(listening(self, steps, calls_of_torch))
        patches.set(self._watch, "on_module", self.keep_all)
        patches.put_around(self._watch, "around", self._around)
        for owner in (GradScaler, *GradScaler.__subclasses__()):
            for name in {"unscale_", "step"} & vars(owner).keys():
                patches.set(owner, name, _end)
        for session in live_sessions:
            for model in session.models:
                self.keep_all(model)
            for optimizer in session.optimizers:
                for param in params_of(optimizer):
                    self.keep(param)
                patches.set(optimizer, "zero_grad", self._zero_grad)
                if (wrapper := wrapper_of(optimizer)) is not None:
                    patches.set(wrapper.findings, "came_through_no_block", True)  # no warning about this backward pass
                    patches.set(wrapper, "clip_grad_norm", _end)
                    patches.set(wrapper, "master_params", _end)

    def _zero_grad(self, *_: Any, **__: Any) -> None:
        for param in self._params:
            param.grad = None

    def step_begins(self, _: Any) -> None:
        raise _Ended

    def backward_begins(self, roots: Sequence[Any]) -> None:
        self._has_run_backward, losses = True, tensors_in(roots)
        with unwatched():
            self._watch.on_loss(losses)
        for loss in losses if self.seed != 1.0 else ():
            loss.register_hook(lambda gradient: gradient * self.seed)

    def backward_ends(self) -> None:
        with unwatched():
            self._watch.on_gradients([param.grad for param in self._params if param.grad is not None])

    @contextlib.contextmanager
    def block_begins(self, loss: torch.Tensor, scaler: Any) -> Iterator[torch.Tensor]:
        scale, self.backoff, self.floor = rule_of(scaler)
        self.scale = scale * self.factor
        yield (loss if isinstance(scaler, GradScaler) else loss.float()) * self.scale


def rule_of(scaler: Any) -> tuple[float, float | None, float]:
    """Return the loss scale, its back-off factor (None for a static scale), and its minimum."""
    if isinstance(scaler, GradScaler):
        return scaler.get_scale(), scaler.get_backoff_factor(), 2.0**-14
    return scaler.loss_scale, *((scaler.rule.backoff_factor, scaler.floor) if scaler.dynamic else (None, 2.0**-14))


def _end(*_: Any, **__: Any) -> None:
    raise _Ended
