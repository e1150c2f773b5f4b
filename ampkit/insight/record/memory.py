"""`Memory`: the storages that live, each followed from the operator that makes it to its end, and what was known of its tensor."""

from __future__ import annotations

import weakref

import torch

from ...sharding import local

WEIGHTS, MASTERS, MOMENTS, GRADIENTS = "weights and buffers", "masters", "moments", "gradients"
CASTS, ACTIVATIONS, INPUTS = "casts of weights", "activations and temporaries", "inputs and others"


class Storage:
    """Memory that lives: its ``kind``, and what is known of the tensor that was made in it last.

    ``name`` is that of a parameter. ``row`` is the `CallRow` that made it. A cast has the dtype that it was cast from
    (``source``), the name of the ``weight`` it is the cast of, None for an activation, and the ``group`` of the call that it was
    made for; one that the script makes is named by ``asked``.
    """

    __slots__ = ("asked", "bytes", "group", "kind", "name", "ref", "row", "source", "weight")

    def __init__(self, size: int, kind: str) -> None:
        self.bytes, self.kind = size, kind
        self.name = self.row = self.source = self.weight = self.group = self.asked = None


class Memory:
    """What lives, from the operator that made it, and the bytes of each kind at the peak of all.

    Kinds are known late (a gradient is one when it is found at its parameter), so the peak is found when it is asked for.
    """

    def __init__(self) -> None:
        self._live: dict[int, Storage] = {}
        self._before: list[Storage] = []  # what was there when the recording began
        self._events: list[Storage] = []  # a storage begins where it is first, and ends where it stands again

    def at(self, tensor: torch.Tensor) -> Storage:
        """The storage of a tensor that an operator reads; one that is not known was there before, or came from another thread."""
        return self._storage(tensor, INPUTS, self._before)

    def made(self, tensor: torch.Tensor) -> Storage:
        """The storage of an operator's result."""
        return self._storage(tensor, ACTIVATIONS, self._events)

    def is_a(self, kind: str, tensor: torch.Tensor) -> Storage:
        found = self.at(tensor)
        found.kind = kind
        return found

    def peak(self) -> dict[str, int]:
        """Bytes by kind, when all of them together were the most."""
        now: dict[str, int] = {}
        at_peak, begun, total, most = now, set(), 0, 0
        for storage in (*self._before, *self._events):
            sign = -1 if id(storage) in begun else 1
            begun.add(id(storage)) if sign > 0 else begun.discard(id(storage))
            now[storage.kind] = now.get(storage.kind, 0) + sign * storage.bytes
            total += sign * storage.bytes
            if total > most:
                most, at_peak = total, dict(now)
        return {kind: size for kind, size in sorted(at_peak.items(), key=lambda item: -item[1]) if size}

    def _storage(self, tensor: torch.Tensor, kind: str, noted: list[Storage]) -> Storage:
        try:
            memory = local(tensor).untyped_storage()
        except (NotImplementedError, RuntimeError):  # a sparse tensor, or a wrapper of another one
            return Storage(0, kind)
        address = memory._cdata
        if address in self._live:
            return self._live[address]
        found = self._live[address] = Storage(memory.nbytes(), kind)
        found.ref = weakref.ref(memory, lambda _: self._ended(address, found))
        noted.append(found)
        return found

    def _ended(self, address: int, storage: Storage) -> None:
        self._events.append(storage)
        if self._live.get(address) is storage:
            del self._live[address]
