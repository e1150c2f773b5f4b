"""Warnings that a session logs once: mistakes that ruin a run, each with its remedy."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..logs import logger
from .gradients import State

_THE_BLOCK = "'with ampkit.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()'"

#: By the name of a condition: the mistake, and its remedy.
ROWS = {
    "hook": (
        "Parameter %s has a hook on its gradient, which runs in the backward pass and sees the gradient multiplied by the loss "
        "scale.",
        "Multiplying by a mask is right there, a clamp, a threshold or a statistic is not: do these to p.grad after the scale_loss "
        "block, where it is unscaled, or train in bfloat16 at loss_scale=1.",
    ),
    "another loss": (
        "The backward pass inside this scale_loss block did not go through the scaled loss, so that its gradients are divided by a "
        "loss scale that they were never multiplied by.",
        f"Call backward() on what the block yields: {_THE_BLOCK}.",
    ),
    "no backward": (
        "A second scale_loss block ended without a backward pass through the scaled loss. Gradients are unscaled where the block "
        "ends, and not after it.",
        f"Call backward() inside of the block: {_THE_BLOCK}.",
    ),
    "outside": (
        "%s.step() uses gradients of a backward pass that ran outside of every scale_loss block. Those of an unscaled loss may "
        "have underflowed, those of a scaled loss are still multiplied by the loss scale.",
        f"Write {_THE_BLOCK}; a loop with a GradScaler takes ampkit.GradScaler() in the place of torch's.",
    ),
    "beside delayed": (
        "A backward pass of an unscaled loss added to gradients that wait at a loss scale: its gradients will be divided by a "
        "scale that they were never multiplied by.",
        "Take every loss through scale_loss(..., delay_unscale=True), or through ampkit.GradScaler().scale, until the gradients "
        "are unscaled.",
    ),
    "scaled": (
        "%s inside the scale_loss block, where gradients are still multiplied by the loss scale: clipping there does not clip what "
        "the step uses.",
        "Do it after the block, on the level of `with`.",
    ),
    "GradScaler": (
        "A torch.amp.GradScaler unscales the gradients of this %s, which initialize() has given a loss scale already.",
        "Leave the GradScaler out, or put ampkit.GradScaler() in its place.",
    ),
    "unowned": (
        "%s has a gradient, but no optimizer given to initialize() updates it: with Apex's policy the gradient stays multiplied by "
        "the loss scale.",
        "Divide it where it is read, or clip the parameters of the optimizer only. A parameter may be frozen.",
    ),
    "assigned": (
        "Float32 values were assigned to weights that %s stores in lower precision (p.data = values). They count; but what is put "
        "back later (p.data = before) is a rounded weight.",
        "Exchange weights by state_dict() and load_state_dict(), or use opt_level='O5', whose weights are float32.",
    ),
    "lower loss": (
        "scale_loss was given a loss in %s. Arithmetic, mean() and a loss function that was bound before initialize() keep the "
        "precision of the model's outputs.",
        "Compute the loss from float32, as in model(x).float().mean(), or use initialize(..., cast_model_outputs=torch.float32). "
        "A loss of torch that is called by its module (torch.nn.functional.cross_entropy, nn.CrossEntropyLoss) is float32 anyway.",
    ),
    "thread": (
        "scale_loss was given a loss in lower precision, in another thread than initialize(): there %s casts what the models' "
        "forward calls, and nothing else.",
        "Compute the loss in a torch.autocast region, call initialize() in the thread that trains, or use scope='forward', with "
        "which models return float32.",
    ),
    "float16 region": (
        "A model ran in a torch.autocast region in float16, whose dtype wins over that of %s. The loss scale is 1, so that small "
        "gradients become 0 there.",
        "Remove the region, or use loss_scale='dynamic', which scales the loss.",
    ),
    "eps": (
        "%s steps in float16 at %s, where its eps of %g is 0: weights become NaN where it divides by 0.",
        "Use eps=1e-4, ampkit.optimizers, whose moments are float32, or O2, which steps in float32.",
    ),
}
#: The largest number that float16 rounds to 0: half of the smallest that it has.
_ZERO_IN_FLOAT16 = 2.0**-25


class Advice:
    """The rows of `ROWS` that one session has logged, and a count of the backward passes through its scaled losses."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self.scaled_loss_was_used = False  # by a backward pass; until then every block checks its own
        self.passes = self._passes_before = 0  # backward passes through scaled losses, counted by a hook

    def is_first(self, row: str) -> bool:
        """Whether this is the first call for ``row``."""
        is_first = row not in self._told
        self._told.add(row)
        return is_first

    def tell(self, row: str, *values: object) -> None:
        if self.is_first(row):
            logger.warning(" ".join(ROWS[row]), *values)

    def before_training(self, optimizer: Any, opt_level: str) -> None:
        """Warn of an optimizer that will divide in float16, where the eps that keeps its divisor from 0 rounds to 0."""
        for group in optimizer.param_groups:
            eps = group.get("eps")
            if isinstance(eps, float) and 0 < eps <= _ZERO_IN_FLOAT16:
                if any(param.dtype is torch.float16 for param in group["params"]):
                    self.tell("eps", type(optimizer).__name__, opt_level, eps)

    # At a block

    def before_backward(self, named: list[Any], scaled: torch.Tensor) -> None:
        """Warn of a parameter with a hook at the first block, and count backward passes through ``scaled``."""
        for wrapper in named if self.is_first("first block") else ():
            for param in wrapper.gradients.params:
                if _has_hook_of_script(param):
                    self.tell("hook", wrapper.owner.name_of(param))
                    break
        self._passes_before = self.passes
        if scaled.requires_grad:
            scaled.register_hook(self._count_pass)

    def _count_pass(self, _: torch.Tensor) -> None:
        self.passes += 1

    def after_backward(self, named: list[Any]) -> None:
        """Warn of a block without a backward pass through its scaled loss, until one pass has gone through one."""
        self.scaled_loss_was_used = self.passes > self._passes_before
        if not self.scaled_loss_was_used:
            if any(wrapper.gradients.has_fresh for wrapper in named if wrapper.gradients.before is State.READY):
                self.tell("another loss")
            elif not self.is_first("a block without a backward pass"):  # a script may leave out a bad batch
                self.tell("no backward")


def _has_hook_of_script(param: torch.Tensor) -> bool:
    """Whether a parameter has other hooks than torch's, ampkit's and Horovod's, which are right at any loss scale."""
    for hooks in (param._backward_hooks, param._post_accumulate_grad_hooks):
        for hook in (hooks or {}).values():
            while isinstance(hook, functools.partial):
                hook = hook.func
            if (getattr(hook, "__module__", None) or "").partition(".")[0] not in ("torch", "ampkit", "horovod"):
                return True
    return False
