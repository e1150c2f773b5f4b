"""What ``clip_grad_norm_`` has yet to do to the gradients of weights with rests: the step does it while it reads them.

Below stands torch's own ``clip_grad_norm_``, which reads narrow gradients as they are: their norm is float32.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .. import kernels
from ..casting.narrow_gradients import stored_gradient
from ..dtypes import LOWER_PRECISION
from ..errors import ConfigurationError
from ..patching import PatchSet, SharedPatches

Slot = Any  # of gradients.py, which imports this module
Seen = tuple[Slot, "weakref.ref[torch.Tensor] | None", int]  # a gradient and its version, or none


class Clipping:
    """The factor of one optimizer's gradients that lie unclipped in ``p.grad``.

    ``pending`` is the product of all clippings since the gradients came, None without any: every step over the same gradients
    multiplies what it reads by it. The gradients of the next block are added to clipped ones, see `Gradients.widen`.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Other gradients come, or none."""
        self.pending: torch.Tensor | None = None
        self._clipped: list[Seen] = []
        self._is_used = False

    def add(self, coefficient: torch.Tensor, slots: Iterable[Slot]) -> None:
        """Clip the gradients of these slots by this too."""
        self.pending = coefficient if self.pending is None else self.pending * coefficient
        self._clipped = seen(slots)
        self._is_used = False

    def check_writes(self, refuses: bool = True) -> None:
        """Raise where a script wrote to gradients between their clipping and a step. After a step, forget the clipping."""
        for one in self._clipped:
            slot = one[0]
            if is_still(one):
                continue
            if self._is_used:
                return self.forget()
            if refuses and slot.gradient is not None:
                raise ConfigurationError(
                    f"The gradient of a parameter of shape {tuple(slot.param.shape)} was written to after "
                    "ampkit.clip_grad_norm_. Clip last, after every backward pass and every change of gradients."
                )
        return None

    def end_step(self) -> None:
        """A step has used it."""
        self._is_used = True


def seen(slots: Iterable[Slot]) -> list[Seen]:
    """The gradients of these slots as they are now; they are not kept alive."""
    found: list[Seen] = []
    for slot in slots:
        gradient = stored_gradient(slot.param)
        found.append((slot, None, 0) if gradient is None else (slot, weakref.ref(gradient), gradient._version))
    return found


def is_still(one: Seen) -> bool:
    """Whether the gradient is the same tensor, with no write since that torch has counted."""
    slot, ref, version = one
    gradient = stored_gradient(slot.param)
    if gradient is None or ref is None:
        return gradient is None and ref is None
    return gradient is ref() and gradient._version == version


def _of_narrow_gradients(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
        params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        gradients = [gradient for param in params if (gradient := stored_gradient(param)) is not None]
        is_plain = all(type(one) is torch.Tensor and one.layout is torch.strided for one in gradients)
        has_narrow = any(one.dtype in LOWER_PRECISION for one in gradients)
        if (
            args
            or kwargs
            or norm_type != 2.0
            or not is_plain
            or not has_narrow
            or len({g.device for g in gradients}) > 1
        ):
            return original(params, max_norm, norm_type, *args, **kwargs)
        norm = kernels.multi_tensor_l2norm(gradients)[0].reshape(())
        kernels.multi_tensor_scale(gradients, gradients, kernels.clip_coefficient(norm, max_norm))
        return norm

    return clip_grad_norm_


def _patch(patches: PatchSet) -> None:
    for module in (torch.nn.utils.clip_grad, torch.nn.utils):
        patches.set(module, "clip_grad_norm_", _of_narrow_gradients(module.clip_grad_norm_))


torchs_clipping = SharedPatches(_patch)
