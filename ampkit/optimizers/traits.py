"""What can be told of an optimizer by its class, and by what a script has put on it, before it takes a step."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ..sharding import is_sharded
from .fused import FusedOptimizer

_HOME = "ampkit."  # of functions that no script has replaced


def is_known(optimizer: Any) -> bool:
    """Whether its class is torch's or ours."""
    return type(optimizer).__module__.startswith(("torch.optim.", "ampkit."))


def evaluates_once(optimizer: Any) -> bool:
    """Whether ``step(closure)`` is known to call the closure once, and before anything else."""
    return is_known(optimizer) and not isinstance(optimizer, torch.optim.LBFGS)


def takes_step_inputs(optimizer: Any) -> bool:
    """Whether it is a fused optimizer of ours whose ``step`` no script has replaced."""
    if not isinstance(optimizer, FusedOptimizer) or "step" in vars(optimizer):
        return False
    step = inspect.unwrap(type(optimizer).step)  # torch wraps it for its hooks
    return bool(optimizer.takes_step_inputs) and step.__module__.startswith(_HOME)


def takes_rests(optimizer: Any) -> bool:
    """Whether its ``update``, which no script has replaced, writes weights and rests together."""
    return bool(optimizer.takes_rests) and type(optimizer).update.__module__.startswith(_HOME)


def clears_as_torch(optimizer: Any) -> bool:
    """Whether ``zero_grad`` is torch's or ours, and not one that a script has written."""
    own = (torch.optim.Optimizer.zero_grad, FusedOptimizer.zero_grad)
    return "zero_grad" not in vars(optimizer) and getattr(type(optimizer), "zero_grad", None) in own


def takes_found_inf(optimizer: Any) -> bool:
    """Whether it skips by itself when told to by its attribute ``found_inf``, as torch's fused optimizers do."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if any(is_sharded(param) for group in optimizer.param_groups for param in group["params"]):
        return False  # torch takes no plain tensor beside DTensors
    return "grad_scaler" not in inspect.signature(optimizer.step).parameters


def lacks_momenta(optimizer: Any) -> bool:
    """Whether this is torch's SGD before its first step with momentum: told to skip it, the fused one keeps memory as it is."""
    return isinstance(optimizer, torch.optim.SGD) and any(
        group["momentum"] and optimizer.state.get(param, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        for param in group["params"][:1]
    )
