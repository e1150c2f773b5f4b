"""`Origins`: what is known of a tensor that lives, by its memory: its name, the row that made it, its dtype before a cast."""

from __future__ import annotations

import weakref

import torch

from ...sharding import local


class Origin:
    """What is known of the tensor that was made in a piece of memory last.

    ``name`` is that of a parameter. ``row`` is the `CallRow` that made it. A cast has the dtype that it was cast from
    (``source``), the origin of the ``weight`` it is the cast of, None for an activation, and the ``group`` of the call that it was
    made for; one that the script makes is named by ``asked``.
    """

    __slots__ = ("asked", "group", "name", "ref", "row", "source", "weight")

    def __init__(self) -> None:
        self.name = self.row = self.source = self.weight = self.group = self.asked = self.ref = None


class Origins:
    def __init__(self) -> None:
        self._live: dict[int, Origin] = {}

    def of(self, tensor: torch.Tensor) -> Origin:
        try:
            memory = local(tensor).untyped_storage()
        except (NotImplementedError, RuntimeError, ValueError):  # sparse, a wrapper of another one, or lazy
            return Origin()
        address = memory._cdata
        if address not in self._live:
            found = self._live[address] = Origin()
            found.ref = weakref.ref(memory, lambda _: self._ended(address, found))
        return self._live[address]

    def _ended(self, address: int, origin: Origin) -> None:
        if self._live.get(address) is origin:
            del self._live[address]
