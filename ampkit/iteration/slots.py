"""A `Slot` stands for one parameter of the optimizers of a session: everything that handles gradients walks slots."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping

import torch

from ..models.float32_values import Float32Value
from .found_inf import FoundInf

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
        self.found_inf: FoundInf | None = None

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
