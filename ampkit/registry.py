"""The registry of what is initialized in this process: sessions (oldest first), wrappers of optimizers, and models.

`watchers` maps each initialized model to its session, which the model's calls notify.
"""

from __future__ import annotations

import operator
import weakref
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

WRAPPER_KEY = "_ampkit"  # where an optimizer has its wrapper

live_sessions: list[Any] = []
watchers: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
wrapper_refs: list[weakref.ref[Any]] = []
#: The number of modules registered in another in this process: values read from a model are valid while it stays the same.
additions = 0
_target = operator.methodcaller("__call__")  # of a reference

#: Wrappers of frameworks around an optimizer: the module of the wrapper's class, and its attribute that holds the optimizer.
_AROUND_OPTIMIZERS = {
    "accelerate.optimizer": "optimizer",
    "lightning.pytorch.core.optimizer": "_optimizer",
    "pytorch_lightning.core.optimizer": "_optimizer",
}


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside of Accelerate's or Lightning's wrapper; any other unchanged."""
    attribute = _AROUND_OPTIMIZERS.get(type(optimizer).__module__)
    inner = None if attribute is None else vars(optimizer).get(attribute)
    return optimizer if inner is None else unwrapped(inner)


def wrapper_of(optimizer: Any) -> Any:
    """The wrapper that a live session has put on this optimizer, or on the one inside of it, if any."""
    wrapper = getattr(optimizer, "__dict__", {}).get(WRAPPER_KEY)
    if wrapper is not None and wrapper.optimizer() is optimizer:
        return wrapper
    inner = unwrapped(optimizer)  # Lightning's wrapper copies the optimizer's attributes, as other copies do
    return None if inner is optimizer else wrapper_of(inner)


def wrappers() -> list[Any]:
    """The optimizer wrappers of live sessions, oldest first."""
    return list(filter(None, map(_target, wrapper_refs)))


def current_session() -> Any:
    """The newest live session, or None before `initialize` and after `close`. Raises nothing."""
    return live_sessions[-1] if live_sessions else None


def session_of(thing: Any) -> Any:
    """The live session that owns a model or an optimizer."""
    wrapper = wrapper_of(thing)
    if wrapper is not None:
        return wrapper.owner
    return next((session for session in reversed(live_sessions) if session.owns(thing)), None)


def _count(*_: Any) -> None:
    global additions
    additions += 1


register_module_module_registration_hook(_count)
