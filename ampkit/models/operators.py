"""torchvision's operators in models of lower precision: computed in float32, as in the tables of O1.

At O2, O3 and O5 nothing of torch is patched. But torchvision's kernels take no bfloat16 and no mixed dtypes, and the weights of
a detection model cannot say which boxes are compared. While a session has cast a model's weights, these operators take
lower precision, compute in float32, and give back the dtype of their first argument, as under torch.autocast. The targets
of a detection model are not cast with its images: a box at 801 is one at 800 in bfloat16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.jit._builtins import _get_builtin_table

from ..casting.tensors import LOWER_PRECISION, cast_floating, map_tensors, tensors_in, to_float32
from ..casting.wrappers import keep_overloads
from ..patching import PatchSet
from ..policy.cast_rules import VISION, is_loaded, resolve_owner

PACKAGE = "torchvision"


class Operators:
    """The patches on torchvision, counted: put there by the first session, or once it is loaded, taken away by the last."""

    def __init__(self) -> None:
        self._users = 0
        self._patches = PatchSet()

    def acquire(self) -> None:
        self._users += 1
        try:
            self.catch_up()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        self._users -= 1
        if not self._users:
            self._patches.restore()

    def catch_up(self) -> None:
        """Patch torchvision if it was loaded since `acquire`."""
        if not self._users or self._patches or not is_loaded(PACKAGE):
            return
        try:
            for path, name in _FUNCTIONS:
                self._patch(resolve_owner(path), name)
        except BaseException:
            self._patches.restore()
            raise

    def _patch(self, owner: Any, name: str) -> None:
        if not hasattr(owner, name):
            return
        wrapper = _in_float32(getattr(owner, name))
        self._patches.set(owner, name, wrapper)
        if owner is resolve_owner(VISION):  # torch.jit.script finds operators by what stands in their place
            self._patches.set(_get_builtin_table(), id(wrapper), f"{PACKAGE}::{name}")

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Without these patches: O1's engine comes and goes beneath them, so that either may be undone first."""
        self._patches.restore()
        try:
            yield
        finally:
            self.catch_up()


def is_detector(model: nn.Module) -> bool:
    """Whether this is a detection model of torchvision's: called as ``model(images, targets)``."""
    return _is_one_of(model, _DETECTORS)


def widen_targets(model: nn.Module) -> None:
    """Let detectors inside ``model``, whose inputs are cast, have targets in float32: they refuse bfloat16."""
    for module in model.modules():
        if _is_one_of(module, ("RoIHeads",)) and _targets_to_float32 not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_targets_to_float32, with_kwargs=True)


def unwiden_targets(model: nn.Module) -> None:
    """Undo `widen_targets`."""
    for module in model.modules():
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is _targets_to_float32]:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def _targets_to_float32(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    targets = {name: map_tensors(value, to_float32) for name, value in kwargs.items() if name == "targets"}
    return (*args[:3], *map_tensors(args[3:], to_float32)), {**kwargs, **targets}


def _is_one_of(module: nn.Module, names: tuple[str, ...]) -> bool:
    package = f"{PACKAGE}.models.detection."
    return any(cls.__name__ in names and cls.__module__.startswith(package) for cls in type(module).__mro__)


def _in_float32(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        first = next((x.dtype for x in tensors_in(args, kwargs)), None)
        if not any(x.dtype in LOWER_PRECISION for x in tensors_in(args, kwargs)):
            return function(*args, **kwargs)
        result = function(*map_tensors(args, to_float32), **map_tensors(kwargs, to_float32))
        return cast_floating(result, first) if first in LOWER_PRECISION else result

    keep_overloads(call, function)
    return call


_DETECTORS = ("GeneralizedRCNN", "RetinaNet", "FCOS", "SSD")
_OPERATORS = ("deform_conv2d", "nms", "ps_roi_align", "ps_roi_pool", "roi_align", "roi_pool")
_FUNCTIONS = (
    *((VISION, name) for name in _OPERATORS),
    # torchvision.ops.batched_nms was bound by others before; what it calls is looked up when it is called.
    ("torchvision.ops.boxes", "_batched_nms_coordinate_trick"),
)

operators = Operators()
