"""`Origins`: what is known of a tensor that lives, by its memory: its name, the row that made it, its dtype before a cast."""

from __future__ import annotations

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ...sharding import local


class Origin:
    """What is known of the tensor that was made in a piece of memory last.

    ``name`` is that of a parameter. ``row`` is the `CallRow` that made it. A cast has the dtype that it was cast from
    (``source``), the origin of the ``weight`` it is the cast of, None for an activation, and the ``group`` of the call that it was
    made for; one that the script makes is named by ``asked``.
    """

    __slots__ = ("asked", "group", "name", "row", "source", "weight")

    def __init__(self) -> None:
        self.name = self.row = self.source = self.weight = self.group = self.asked = None


class Origins:
    def __init__(self) -> None:
        self._of_memory = WeakIdKeyDictionary()

    def of(self, tensor: torch.Tensor) -> Origin:
        try:
            memory = local(tensor).untyped_storage()
        except (NotImplementedError, RuntimeError, ValueError):  # sparse, a wrapper of another one, or lazy
            return Origin()
        found: Origin | None = self._of_memory.get(memory)
        if found is None:
            found = self._of_memory[memory] = Origin()
        return found
