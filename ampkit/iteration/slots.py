"""A `Slot` stands for one parameter of the optimizers of a session: everything that handles gradients walks slots.

A `BackwardPass` says what made the gradients of slots: the scale of its loss, and which parameters it came to.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from ..casting.narrow_gradients import stored_gradient
from ..models.float32_values import Float32Value
from ..optimizers.scales import Scale, inverse

WRAPPER_KEY = "_ampkit"  # where an optimizer has its wrapper


class Slot:
    """One parameter, and where its gradient is: unscaled in ``param.grad`` after a block, in ``stash`` while another one is open.

    ``entry`` has its float32 value, where the model computes with it in lower precision and trains it in float32; then the
    gradient may be float32 too. ``owners`` counts the optimizers that update the parameter. Where there are several,
    ``found_inf`` is what the block found that the gradient came from.
    """

    __slots__ = ("__weakref__", "entry", "found_inf", "owners", "param", "stash")

    def __init__(self, param: torch.Tensor, entry: Float32Value | None) -> None:
        self.param = param
        self.entry = entry
        self.owners = 0
        self.stash: torch.Tensor | None = None
        self.found_inf: Any = None

    @property
    def gradient(self) -> torch.Tensor | None:
        """``param.grad`` as it is stored: a script that reads that of a float32 weight gets it in float32."""
        return stored_gradient(self.param)

    def clear(self) -> None:
        """Forget everything about the gradient but ``param.grad``."""
        self.stash = self.found_inf = None


class Slots:
    """The slots of a session, one for each parameter, however many optimizers update it."""

    def __init__(self) -> None:
        self._slots: MutableMapping[int, Slot] = weakref.WeakValueDictionary()  # by the parameter's id

    def of(self, params: Iterable[torch.Tensor], values: Mapping[torch.Tensor, Float32Value]) -> Iterator[Slot]:
        """The slots of these parameters; ``values`` has the float32 values of those that are in lower precision."""
        for param in params:
            slot = self._slots.get(id(param))
            if slot is None:
                entry = values.get(param)
                if entry is not None and entry.rest is None:  # made of cast weights since, by a parametrization
                    entry.rest = torch.zeros_like(param, dtype=torch.int16, requires_grad=False)
                slot = self._slots[id(param)] = Slot(param, entry)
            yield slot


@dataclass(eq=False)
class BackwardPass:
    """What has to be known of a backward pass to unscale its gradients.

    Its loss was multiplied by ``scale``. ``local`` says that it ran under ``DDP.no_sync()``. ``exact_in_place`` says that the scale
    is a power of two, so that bfloat16 can be divided by it without rounding. ``done`` are the slots of several optimizers that one
    of them has handled; None where there is only one optimizer.
    """

    scale: Scale
    local: bool = False
    exact_in_place: bool = False
    done: set[Slot] | None = None

    def __post_init__(self) -> None:
        self.inv = inverse(self.scale)

    def take(self, slots: list[Slot]) -> list[Slot]:
        """Those that no other optimizer has handled; they count as handled from here on."""
        if self.done is None:
            return slots
        remaining = [slot for slot in slots if slot not in self.done]
        self.done.update(slot for slot in remaining if slot.owners > 1)
        return remaining


def is_sparse(gradient: torch.Tensor) -> bool:
    return gradient.layout is not torch.strided


def values_of(gradient: torch.Tensor) -> torch.Tensor:
    """What a gradient stores: all of it, or the values of a sparse one."""
    return gradient._values() if is_sparse(gradient) else gradient
