"""Facts about an optimizer before its step, from its class and from the methods and hooks that a script has put on it."""

from __future__ import annotations

import inspect
import sys
from typing import Any, NamedTuple

import torch

from .fused import FusedOptimizer

_HOME = "ampkit."  # of functions that no script has replaced


def is_known(optimizer: Any) -> bool:
    """Whether an optimizer's class is torch's or ampkit's."""
    return type(optimizer).__module__.startswith(("torch.optim.", "ampkit."))


def evaluates_once(optimizer: Any) -> bool:
    """Whether ``step(closure)`` is known to call the closure once, and before anything else."""
    return is_known(optimizer) and not isinstance(optimizer, torch.optim.LBFGS)


def hand_over(optimizer: Any, to_session: bool) -> None:
    """Tell an optimizer of ampkit's that a session takes it, or gives it back."""
    if isinstance(optimizer, FusedOptimizer):
        optimizer.hand_over(to_session)


class Traits(NamedTuple):
    """Facts about an optimizer's methods, read before `initialize` replaces them.

    ``takes_inputs``: it is a fused optimizer of ampkit's whose ``step`` no script has replaced; ``takes_rests``: its ``update``
    writes weights and rests together. ``has_own_step``: its ``step`` is that of torch's Adam or SGD, though a scheduler may wrap
    it. ``clears_as_torch``: its ``zero_grad`` is torch's or ampkit's.
    """

    takes_inputs: bool
    takes_rests: bool
    has_own_step: bool
    clears_as_torch: bool

    @classmethod
    def of(cls, optimizer: Any) -> Traits:
        is_ours = isinstance(optimizer, FusedOptimizer)
        step = inspect.unwrap(type(optimizer).step)  # torch wraps it for its hooks
        takes_inputs = is_ours and "step" not in vars(optimizer) and step.__module__.startswith(_HOME)
        takes_rests = is_ours and optimizer.takes_rests and type(optimizer).update.__module__.startswith(_HOME)
        takes_inputs = takes_inputs and optimizer.takes_step_inputs
        own_zero_grad = (torch.optim.Optimizer.zero_grad, FusedOptimizer.zero_grad)
        return cls(
            bool(takes_inputs),
            bool(takes_inputs and takes_rests),
            inspect.unwrap(optimizer.step).__module__ in ("torch.optim.adam", "torch.optim.sgd"),
            "zero_grad" not in vars(optimizer) and getattr(type(optimizer), "zero_grad", None) in own_zero_grad,
        )


# The hooks of torch.optim.optimizer.register_optimizer_step_pre_hook and register_optimizer_step_post_hook.
_pre_hooks_of_all = sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
_post_hooks_of_all = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks


def has_hooks(optimizer: Any) -> bool:
    """Whether hooks of the script run before or after this optimizer's update, where gradients and weights may be written to."""
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", None) or getattr(
        optimizer, "_optimizer_step_post_hooks", None
    )
    return hooks is not None and bool(hooks or _pre_hooks_of_all or _post_hooks_of_all)
