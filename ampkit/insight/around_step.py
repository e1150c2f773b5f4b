"""`AroundStep`: a context around each step of an optimizer, by a wrapper of its ``step``.

It also wraps the patch of `ampkit.initialize`: the context sees gradients and weights as a script sees them.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from .. import validation
from ..api import step_was_skipped
from ..errors import ConfigurationError
from ..optimizers.scales import moved_to
from ..patching import PatchSet
from ..registry import session_of, wrapper_of

#: The name of a parameter, the parameter, and its parameter group.
Named = tuple[str, torch.Tensor, dict[str, Any]]


class AroundStep:
    """A wrapper that runs every ``optimizer.step()``, skipped ones included, inside of `around`, until `remove`.

    ``function`` is the name of the public function for error messages.
    """

    def __init__(self, optimizer: Any, function: str) -> None:
        self.optimizer = validation.optimizer(optimizer, function)
        self._function, self._wrapper = function, wrapper_of(self.optimizer)
        self._patches, self._is_active = PatchSet(), True
        self._put_around(self.optimizer.step)

    def around(self) -> AbstractContextManager[None]:
        raise NotImplementedError

    def remove(self) -> None:
        """Stop observing steps, and restore ``optimizer.step``."""
        self._is_active = False
        self._patches.restore()

    def _put_around(self, original: Callable[..., Any]) -> None:
        @functools.wraps(original)
        def step(_: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_active or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            if self._wrapper is not wrapper_of(self.optimizer) and wrapper_of(self.optimizer) is not None:
                raise ConfigurationError(
                    f"{self._function}() was called before initialize(), whose steps it cannot see. Call {self._function}() "
                    "after initialize()."
                )
            with self.around():
                return original(*args, **kwargs)

        self._patches.set(self.optimizer, "step", types.MethodType(step, self.optimizer))


def is_skipped(optimizer: Any) -> bool:
    """Whether the step that ends was skipped. With torch.amp.GradScaler torch's fused optimizers skip on the device, by a flag."""
    flag = getattr(optimizer, "found_inf", None)
    return step_was_skipped(optimizer) or (flag is not None and bool(flag))


def named_params(optimizer: Any) -> Iterator[Named]:
    """Yield an optimizer's parameters, named as in its models if known, else by ``param_names`` of the group or their places."""
    session = session_of(optimizer)
    of_models = [] if session is None else [list(model.named_parameters()) for model in session.models]
    known = {
        param: name if len(of_models) == 1 else f"{index}.{name}"
        for index, named in enumerate(of_models)
        for name, param in named
    }
    for number, group in enumerate(optimizer.param_groups):
        places = (f"param_groups[{number}]['params'][{i}]" for i in range(len(group["params"])))
        for name, param in zip(group.get("param_names") or places, group["params"], strict=True):
            yield known.get(param, name), param, group


def to_host(shares: dict[str, torch.Tensor]) -> dict[str, float]:
    """Convert scalar tensors to numbers, with a single read from the device."""
    values = list(shares.values())
    if not values:
        return {}
    return dict(zip(shares, torch.stack([moved_to(value, values[0].device) for value in values]).tolist()))
