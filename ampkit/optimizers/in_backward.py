"""The hooks of an optimizer without a session in a backward pass: they step parameter by parameter, or watch sums.

With ``step_in_backward`` a hook on each parameter updates it as soon as its gradient is complete, and frees the gradient. Without
it one hook, on the first parameter in lower precision, warns once of gradients that add up there. `widen_sums` lets them add up
in float32. A session checks gradients itself, and removes the hooks while it lasts.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ..dtypes import LOWER_PRECISION
from ..logs import logger
from ..sharding import are_several_processes, is_sharded
from .scales import moved_to


class BackwardHooks:
    """The hooks of one optimizer, and the flag of its gradients since its last step."""

    def __init__(self) -> None:
        self.accumulates = False
        self.told_of = 0.0  # skipped steps
        self._handles: dict[int, Any] = {}  # by the id of the parameter
        self._stepped: set[int] = set()
        self._widened: dict[int, Tensor] = {}  # parameters, by their id
        self._found_inf: Tensor | None = None
        self._has_told = False  # of gradients that add up
        self._last: weakref.ref[Tensor] | None = None  # the gradient that the watched parameter had

    def follow(self, optimizer: Any, none: bool = False) -> None:
        """Put hooks on the parameters that the optimizer holds now, or with ``none`` remove all hooks."""
        params: list[Any] = list(_trained(optimizer))
        if not optimizer.step_in_backward:
            params = list(_lower(optimizer))[:1] if optimizer.rests else []
        wanted = {} if none else {id(param): param for param in params}
        for key in self._handles.keys() - wanted.keys():
            self._handles.pop(key).remove()
        ref, act = weakref.ref(optimizer), self._step if optimizer.step_in_backward else self._watch

        def hook(param: Tensor) -> None:
            if (alive := ref()) is not None and not self.accumulates:
                act(alive, param)

        for key in wanted.keys() - self._handles.keys():
            self._handles[key] = wanted[key].register_post_accumulate_grad_hook(hook)

    def heed(self, found_inf: Tensor) -> None:
        """Combine a further flag into the one that the next `end_step` returns."""
        flag = self._found_inf
        self._found_inf = found_inf if flag is None else torch.maximum(flag, moved_to(found_inf, flag.device))

    def end_step(self) -> Tensor | None:
        """Return the highest flag since the step before, None where nothing was judged, and reset it for new gradients."""
        flag, self._found_inf, self._last = self._found_inf, None, None
        self._stepped.clear()
        return flag

    def widen_sums(self, optimizer: Any) -> None:
        """Make gradients of parameters in lower precision float32 until they are cleared, also the present ones."""
        lower = list(_lower(optimizer))
        if any(map(is_sharded, lower)) or (lower and are_several_processes()):
            raise RuntimeError(
                f"{type(optimizer).__name__}.accumulating() widens gradients on one process alone: DDP averages them in the "
                "precision of the parameters. FSDP2 adds them up in float32 itself: fully_shard(..., "
                "mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)), and model.set_requires_gradient_sync(False) for all "
                "micro-batches but the last."
            )
        for param in lower:
            if param.grad_dtype is not torch.float32:
                gradient, param.grad = param.grad, None
                param.grad_dtype = torch.float32
                param.grad = None if gradient is None else gradient.float()
                self._widened[id(param)] = param

    def end_sums(self) -> None:
        """Undo `widen_sums` after ``zero_grad``: gradients get the dtype of the backward pass, whatever the parameter becomes."""
        self._last = None
        for key, param in list(self._widened.items()):
            if param.grad is None:
                param.grad_dtype = None  # a dtype would stay when ``model.float()`` changes the parameter's
                del self._widened[key]

    def _step(self, optimizer: Any, param: Tensor) -> None:
        group = next((group for group in optimizer.param_groups if any(p is param for p in group["params"])), None)
        if group is None:  # a script has taken it out
            return
        if are_several_processes():
            raise RuntimeError(
                f"{type(optimizer).__name__}(step_in_backward=True) runs on one process: on several, gradients are averaged after "
                "it has stepped. Leave it out, and shard the model to save memory: torch.distributed.fsdp.fully_shard."
            )
        if id(param) in self._stepped:
            raise RuntimeError(
                f"{type(optimizer).__name__}(step_in_backward=True): a second backward pass came before optimizer.step(), and "
                f"the parameter of shape {tuple(param.shape)} has stepped in the first. Run all passes of a step but the last "
                "inside of 'with optimizer.accumulating():', and call optimizer.step() after the last."
            )
        if param.grad is None:
            raise RuntimeError(
                f"{type(optimizer).__name__}(step_in_backward=True): another optimizer has stepped the parameter of shape "
                f"{tuple(param.shape)} in this backward pass. Give it to one; an earlier optimizer goes by 'del' and gc.collect()."
            )
        self._stepped.add(id(param))
        optimizer.step_now(group, param)
        param.grad = None
        if self._widened.pop(id(param), None) is not None:
            param.grad_dtype = None

    def _watch(self, optimizer: Any, param: Tensor) -> None:
        if self._has_told or param.grad is None or param.grad.dtype not in LOWER_PRECISION:
            return
        if self._last is not None and self._last() is param.grad:
            self._has_told = True
            logger.warning(
                "%s: a second backward pass adds to gradients in %s, which loses digits. Run the backward passes of one step "
                "inside of 'with optimizer.accumulating():', which adds them up in float32.",
                type(optimizer).__name__,
                param.grad.dtype,
            )
        else:
            self._last = weakref.ref(param.grad)


def _trained(optimizer: Any) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.requires_grad and not is_lazy(param):
                yield param


def _lower(optimizer: Any) -> Iterator[Tensor]:
    return (param for param in _trained(optimizer) if param.dtype in LOWER_PRECISION)
