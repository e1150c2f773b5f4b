"""What computes in float32 beside weights of lower precision, as in the tables of O1: torch's losses, torchvision's operators.

At O2, O3 and O5 nothing else of torch is patched. While a session has cast a model's weights, the losses of
torch.nn.functional, which a model may compute inside of its forward, take lower precision, compute in float32 and return it,
as under torch.autocast; `disable_casts` suspends that.

torchvision's kernels take no bfloat16 and no mixed dtypes, and the weights of a detection model cannot say which boxes are
compared. Its operators compute in float32 too, but give back the dtype of their first argument. The targets of a detection
model are not cast with its images: a box at 801 is one at 800 in bfloat16.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit._builtins import _get_builtin_table

from ..casting.decorators import cast_models
from ..casting.engine import active_casting, keep_on_top
from ..casting.fp32_functions import without_copies
from ..casting.pickling import patch_picklers
from ..casting.tensors import cast_floating, map_tensors, tensors_in, to_float32
from ..casting.wrappers import keep_overloads
from ..dtypes import LOWER_PRECISION
from ..patching import PatchSet
from ..policy.cast_rules import VISION, is_loaded, resolve_owner
from ..policy.tables import LOSSES

PACKAGE = "torchvision"


class Operators:
    """The patches, counted: put there by the first session, torchvision's once it is loaded, taken away by the last."""

    def __init__(self) -> None:
        self._users = 0
        self._losses = PatchSet()
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
            self._restore()

    def catch_up(self) -> None:
        """Patch torchvision if it was loaded since `acquire`."""
        if not self._users or (self._losses and (self._patches or not is_loaded(PACKAGE))):
            return
        try:
            if not self._losses:
                self._patch_losses()
            if not self._patches and is_loaded(PACKAGE):
                for path, name in _FUNCTIONS:
                    self._patch(resolve_owner(path), name)
        except BaseException:
            self._restore()
            raise

    def _restore(self) -> None:
        self._patches.restore()
        self._losses.restore()

    def _patch_losses(self) -> None:
        originals, wrappers = {}, {}
        for name in LOSSES:
            original = getattr(F, name)
            wrapper = _loss_in_float32(original, name)
            originals[wrapper], wrappers[original] = original, wrapper
            self._losses.set(F, name, wrapper)
        casting = active_casting()
        beneath = casting.wrapper_of if casting is not None else {}.get
        patch_picklers(self._losses, lambda function: _on_top(wrappers, function, beneath(function)))
        compile_function = torch.jit._recursive.try_compile_fn

        @functools.wraps(compile_function)
        def compile_original(function: Any, *args: Any, **kwargs: Any) -> Any:
            # torch.jit.script compiles what a function calls from its source, and has to see torch's own.
            if isinstance(function, types.FunctionType):
                function = originals.get(function, function)
            return compile_function(function, *args, **kwargs)

        self._losses.set(torch.jit._recursive, "try_compile_fn", compile_original)

    def _patch(self, owner: Any, name: str) -> None:
        if not hasattr(owner, name):
            return
        wrapper = _in_float32(getattr(owner, name))
        self._patches.set(owner, name, wrapper)
        if owner is resolve_owner(VISION):  # torch.jit.script finds operators by what stands in their place
            self._patches.set(_get_builtin_table(), id(wrapper), f"{PACKAGE}::{name}")

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Without these patches: O1's engine works beneath them."""
        self._restore()
        try:
            yield
        finally:
            self.catch_up()


def _on_top(wrappers: dict[Callable, Callable], function: Callable, o1s: Any | None) -> Any | None:
    """What stands in the place of ``function`` where ``wrappers`` stand, perhaps over O1's wrapper of it."""
    return wrappers.get(function if o1s is None else o1s, o1s)


def is_detector(model: nn.Module) -> bool:
    """Whether this is a detection model of torchvision's: called as ``model(images, targets)``."""
    return _is_one_of(model, _DETECTORS)


def widen_targets(model: nn.Module) -> None:
    """Let detectors inside ``model``, whose inputs are cast, have targets in float32: they refuse bfloat16."""
    for module in model.modules():
        if _is_one_of(module, ("RoIHeads",)) and _targets_to_float32 not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_targets_to_float32, with_kwargs=True)


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


class _CastsOfLosses:
    """Whether losses are cast: where O1's casts are on, its tables decide. What `without_copies` asks."""

    def is_on(self) -> bool:
        if not cast_models.is_on():
            return False
        casting = active_casting()
        return casting is None or not casting.is_on()

    def casts_on(self, device_type: str) -> bool:
        return True


_casts_of_losses = _CastsOfLosses()


def _loss_in_float32(function: Callable, name: str) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _casts_of_losses.is_on():
            return function(*args, **kwargs)
        return function(*map(_widened, args), **{key: _widened(value) for key, value in kwargs.items()})

    call = without_copies(call, function, _casts_of_losses, F, name, None) or call
    return functools.wraps(function)(call)


def _widened(value: Any) -> Any:
    return to_float32(value) if isinstance(value, Tensor) else value


_DETECTORS = ("GeneralizedRCNN", "RetinaNet", "FCOS", "SSD")
_OPERATORS = ("deform_conv2d", "nms", "ps_roi_align", "ps_roi_pool", "roi_align", "roi_pool")
_FUNCTIONS = (
    *((VISION, name) for name in _OPERATORS),
    # torchvision.ops.batched_nms was bound by others before; what it calls is looked up when it is called.
    ("torchvision.ops.boxes", "_batched_nms_coordinate_trick"),
)

operators = Operators()
keep_on_top(operators.lifted)
