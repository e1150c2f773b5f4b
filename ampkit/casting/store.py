"""Where casts of weights are kept until they are dropped.

A store only keeps and looks up, and checks on each look-up that the entry still holds; `CastCache` decides which casts are
kept, and for how long. This class is the specification of ampkit._casting.CastStore, its twin in C++, in which the wrappers in
C++ find their casts. Two things that change no result, only the twin does: it casts weights ahead (`CastStore.drop`), and it
remembers the last four casts of activations, weakly on both sides, so that query, key and value share one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# Bound once: each is asked on every call with a weight.
_grad_enabled = torch.is_grad_enabled
_inference_mode = torch.is_inference_mode_enabled


Stamp = tuple[int, int, int, int]
"""What a weight is: the generation of the store, the weight's version and address, and whether it requires gradients."""


class _WeightCast(NamedTuple):
    weight: weakref.ref[Tensor]
    cast: Tensor
    cast_version: int
    stream: int
    stamp: Stamp
    storage: torch.UntypedStorage  # kept alive, so that no other storage can come to lie at the stamp's address


class CastStore:
    """Casts of tensors to one dtype.

    Casts made with and without grad mode, and in inference mode, are kept apart: one that autograd did not record is
    useless for training, and one that it did would keep a graph alive through an evaluation. A cast is found only on the
    stream that it was made on: another one could read it before it is written.
    """

    def __init__(self) -> None:
        #: Nothing is looked up or kept.
        self.bypassed = False
        #: What tells whether the current stream is being captured into a CUDA graph, which counts as bypassed.
        self.capturing: Callable[[], bool] | None = None
        #: Casts that autograd did not record are kept too, until `drop_without_grad`.
        self.keep_without_grad = False
        #: How many casts of weights were made, kept or not.
        self.casts_made = 0
        self._with_grad: dict[int, _WeightCast] = {}
        self._without_grad: dict[int, _WeightCast] = {}
        self._in_inference: dict[int, _WeightCast] = {}
        self._generation = 0

    def __len__(self) -> int:
        """The number of casts of weights."""
        return sum(map(len, self._modes))

    def find(self, weight: Tensor) -> Tensor | None:
        """The cast of ``weight``, if there is one, neither side was written to since, and grad mode is the same."""
        casts = self._of_this_mode()
        entry = casts.get(id(weight))
        if entry is not None:
            # A dead weight takes its entry along, before another can have its id.
            _, cast, cast_version, stream, (_, version, data_ptr, requires_grad), _ = entry
            if (
                weight._version == version
                and weight.data_ptr() == data_ptr
                and weight.requires_grad == requires_grad
                and (weight.is_cpu or _stream_of(weight) == stream)
                and (cast_version < 0 or cast._version == cast_version)
            ):
                return cast
        return None

    def stamp(self, weight: Tensor) -> Stamp:
        """What ``weight`` is now; taken before it is cast."""
        return self._generation, weight._version, weight.data_ptr(), int(weight.requires_grad)

    def keep(self, weight: Tensor, cast: Tensor, made_of: Stamp) -> None:
        """Keep ``cast`` for as long as ``weight`` lives, to which it must not lead back other than by autograd.

        Unless the weight is not any more what it was ``made_of``: another thread may have written to it, or dropped the
        casts, while this one was being made.
        """
        casts = self._of_this_mode()
        address, discard = id(weight), self._discard
        casts[address] = _WeightCast(
            weakref.ref(weight, lambda dead: discard(address, dead)),
            cast,
            _version_of(cast),
            _stream_of(weight),
            made_of,
            weight.untyped_storage(),
        )
        # Only now: what another thread does after this look takes the entry along.
        if self.stamp(weight) != made_of:
            casts.pop(address, None)

    def forget(self, tensor: Tensor) -> None:
        """Forget the casts of one weight. The twin in C++ forgets those of all activations, which may share the weight's memory."""
        self._generation += 1
        for casts in self._modes:
            casts.pop(id(tensor), None)

    def drop(self, *, before_backward: bool = False) -> None:
        """Forget every cast.

        The twin in C++ also casts ahead. At the first miss after a drop that was not ``before_backward``, with grad mode
        on, it casts with the weight that is asked for its companions: the weights whose casts were found or made, and not
        only made ahead, between the drops of the last forward pass. They must be parameters of the same dtype and device
        that require gradients, with their storage allocated, and small where they are on the CPU.
        """
        self.drop_without_grad()
        self._with_grad.clear()

    def drop_without_grad(self) -> None:
        """Forget the casts that autograd did not record."""
        self._generation += 1
        self._without_grad.clear()
        self._in_inference.clear()

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Every weight that has a cast here, with it."""
        entries = [entry for casts in self._modes for entry in list(casts.values())]
        return [(weight, entry.cast) for entry in entries if (weight := entry.weight()) is not None]

    def _discard(self, address: int, reference: weakref.ref) -> None:
        """Forget a weight that died. Its address may belong to another one by now, with another reference."""
        for casts in self._modes:
            if address in casts and casts[address].weight is reference:
                del casts[address]

    def _of_this_mode(self) -> dict[int, _WeightCast]:
        if _grad_enabled():
            return self._with_grad
        return self._in_inference if _inference_mode() else self._without_grad

    @property
    def _modes(self) -> tuple[dict[int, _WeightCast], ...]:
        return self._with_grad, self._without_grad, self._in_inference


def _version_of(cast: Tensor) -> int:
    return -1 if cast.is_inference() else cast._version


def _stream_of(tensor: Tensor) -> int:
    """Where kernels on the tensor are queued now."""
    return 0 if tensor.is_cpu or tensor.is_meta else torch.accelerator.current_stream(tensor.device).stream_id
