"""Stores of casts of weights, and how long each is kept: see "A cast ends with its call" in NOTES.md.

`CastStore.lifetime_of` asks that rule, and nothing else does; `CastCaches` decides who looks. This class is the specification of
ampkit._casting.CastStore, its twin in C++, in which the wrappers in C++ find their casts. Two things that change no result, only
the twin does: it casts weights ahead (`CastStore.end`), and it remembers the last four casts of activations.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from ..labels import labelled

_grad_enabled = torch.is_grad_enabled
_inference_mode = torch.is_inference_mode_enabled

# Lifetimes that no call ends; those of calls are counted from 1.
_NOT_KEPT, _ENDED, _TO_STEP = 0, -1, -2

# The uses of a cast by one call of which the gradients add up in the cast's precision.
_USES_OF_A_NODE = 64


class _ThisThread(threading.local):
    """The number of the outermost call that runs, and of the innermost `keep_casts`, with its weights."""

    def __init__(self) -> None:
        self.call = _NOT_KEPT
        self.kept = _NOT_KEPT
        self.kept_weights: tuple[Tensor, ...] = ()


_this_thread = _ThisThread()

Stamp = tuple[int, int, int, bool]
"""What a weight is: the generation of the store, the weight's version and address, and whether it requires gradients."""


@dataclass(eq=False, slots=True)
class _WeightCast:
    weight: weakref.ref[Tensor]
    cast: Tensor
    lifetime: int
    call: int
    has_node: bool
    uses: int
    cast_version: int
    stream: int
    stamp: Stamp
    storage: torch.UntypedStorage  # kept alive, so that no other storage can come to lie at its address


class CastStore:
    """Casts of tensors to one dtype.

    Casts made with grad mode, without it, and in inference mode are kept apart: one that autograd did not record is
    useless for training, and one that it did would keep a graph alive through an evaluation.
    """

    def __init__(self) -> None:
        #: Nothing is looked up or kept.
        self.bypassed = False
        #: Whatever autograd records is kept to the next `drop`.
        self.keeps_all = False
        #: What tells whether the current stream is being captured into a CUDA graph, which counts as bypassed.
        self.capturing: Callable[[], bool] | None = None
        #: How many casts of weights were made, kept or not.
        self.casts_made = 0
        #: Those made with grad mode, without it, and in inference mode, by the id of the weight.
        self._casts: tuple[dict[int, _WeightCast], ...] = ({}, {}, {})
        self._to_step: set[Tensor] = set()
        self._generation = 0

    @staticmethod
    def set_call(number: int) -> int:
        """The outermost call of an initialized model, 0 for none. Returns what it was before."""
        before, _this_thread.call = _this_thread.call, number
        return before

    @staticmethod
    def set_kept(number: int, weights: tuple[Tensor, ...]) -> int:
        """The innermost `keep_casts`, 0 for none, and the weights whose casts it keeps. Returns which it was before."""
        before, _this_thread.kept, _this_thread.kept_weights = _this_thread.kept, number, weights
        return before

    def lifetime_of(self, weight: Tensor) -> int:
        """The lifetime of a cast of ``weight`` that is made now, in this thread."""
        if any(kept is weight for kept in _this_thread.kept_weights):
            return _this_thread.kept
        if _grad_enabled() and (self.keeps_all or (_this_thread.call and weight in self._to_step)):
            return _TO_STEP
        return _this_thread.call

    def cast(self, weight: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
        """The cast of ``weight`` that this thread may use, if neither side was written to since; else what ``convert`` makes of it.

        After 64 uses, and in another call, it is the same memory with a node of its own.
        """
        entry = self._casts[0 if _grad_enabled() else 1 + _inference_mode()].get(id(weight))
        if entry is None:
            return self._cast_anew(weight, convert)
        call, lifetime, cast, cast_version = _this_thread.call, entry.lifetime, entry.cast, entry.cast_version
        _, version, data_ptr, requires_grad = entry.stamp
        # A dead weight takes its entry along, before another can have its id.
        if not (
            (lifetime == call or lifetime == _TO_STEP or lifetime == _this_thread.kept)
            and weight._version == version
            and weight.data_ptr() == data_ptr
            and weight.requires_grad == requires_grad
            and (weight.is_cpu or _stream_of(weight) == entry.stream)
            and (cast_version < 0 or cast._version == cast_version)
        ):
            return self._cast_anew(weight, convert)
        uses = entry.uses = entry.uses + 1
        if entry.has_node and (entry.call != call or uses > _USES_OF_A_NODE):
            cast = entry.cast = _Use.apply(weight, cast.detach())
            entry.call, entry.uses = call, 1
        return cast

    @labelled("cast weights")
    def _cast_anew(self, weight: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
        """Cast, and keep it unless another thread has written to the weight, or dropped casts, meanwhile."""
        is_plain = _is_plain(weight)
        # The storage stays alive until the stamp is compared, so that no other comes to lie at its address.
        made_of, storage = (self._stamp(weight), weight.untyped_storage()) if is_plain else (None, None)
        cast = convert(weight)
        if cast is weight:  # on a device that is not the session's
            return cast
        self.casts_made += 1
        lifetime = self.lifetime_of(weight)
        if made_of is not None and lifetime != _NOT_KEPT and _means_the_same(cast):
            casts = self._casts[0 if _grad_enabled() else 1 + _inference_mode()]
            casts[id(weight)] = _WeightCast(
                weight=weakref.ref(weight, self._discard),
                cast=cast,
                lifetime=lifetime,
                call=_this_thread.call,
                has_node=cast.requires_grad,
                uses=1,
                cast_version=-1 if cast.is_inference() else cast._version,
                stream=_stream_of(weight),
                stamp=made_of,
                storage=storage,
            )
            # Only now: what another thread does after this look takes the entry along.
            if self._stamp(weight) != made_of:
                casts.pop(id(weight), None)
        return cast

    def _stamp(self, weight: Tensor) -> Stamp:
        return self._generation, weight._version, weight.data_ptr(), weight.requires_grad

    def forget(self, tensor: Tensor) -> None:
        """Forget the casts of all weights in the memory of ``tensor``. The twin in C++ forgets those of all activations too."""
        self._generation += 1
        storage = tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else None
        self._take_out(lambda entry: entry.weight() is tensor or entry.storage._cdata == storage)

    def drop(self) -> None:
        """Forget every cast, and which weights' casts were to live to the optimizer step."""
        self._generation += 1
        self._to_step = set()
        self._take_out(lambda entry: True)

    def end(self, lifetime: int) -> None:
        """End the call of this number: its casts that autograd recorded wait for `drop_ended`, others go.

        The twin in C++ also remembers which weights the call used. At the first miss of the next call that begins with the same
        weight, with grad mode on, it casts them all with that one. They must be parameters of the same dtype and device that
        require gradients, with their storage allocated, and small where they are on the CPU.
        """
        for entry in list(self._casts[0].values()):
            if entry.lifetime == lifetime and entry.has_node:
                entry.lifetime = _ENDED
        self._take_out(lambda entry: entry.lifetime == lifetime)

    def drop_ended(self) -> None:
        """Let go of the casts of calls that have ended: autograd alone keeps those that a backward pass needs."""
        self._take_out(lambda entry: entry.lifetime == _ENDED)

    def keep_to_step(self, weights: tuple[Tensor, ...]) -> None:
        """Have the casts of these weights live to the next `drop`: those of calls that have ended, and later ones."""
        self._to_step = set(weights)
        for entry in list(self._casts[0].values()):
            if entry.lifetime == _ENDED and entry.weight() in self._to_step:
                entry.lifetime = _TO_STEP

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Every weight that has a cast here, with it."""
        alive = [entry for casts in self._casts for entry in list(casts.values()) if entry.lifetime != _ENDED]
        return [(weight, entry.cast) for entry in alive if (weight := entry.weight()) is not None]

    def _take_out(self, ends: Callable[[_WeightCast], bool]) -> None:
        for casts in self._casts:
            for address in [address for address, entry in list(casts.items()) if ends(entry)]:
                casts.pop(address, None)

    def _discard(self, reference: weakref.ref) -> None:
        """Forget a weight that died. Its address may belong to another one by now, with another reference."""
        self._take_out(lambda entry: entry.weight is reference)


class _Use(torch.autograd.Function):
    """The memory of a cast, for one more call, whose gradient is converted and added up by itself."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, memory: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return memory

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


def _is_plain(weight: Tensor) -> bool:
    """Whether the weight has a version counter and a storage of its own to watch."""
    return (
        weight.layout is torch.strided
        and not weight.is_inference()
        and not is_functorch_wrapped_tensor(weight)
        and torch._C._has_storage(weight)
    )


def _means_the_same(cast: Tensor) -> bool:
    """Whether the cast means the same to a later caller: not under a transform of torch.func, a fake mode, inference mode."""
    of_inference = _grad_enabled() and cast.is_inference()
    return type(cast) is Tensor and not is_functorch_wrapped_tensor(cast) and not of_inference


def _stream_of(tensor: Tensor) -> int:
    """The stream that kernels on the tensor are queued on now."""
    return 0 if tensor.is_cpu or tensor.is_meta else torch.accelerator.current_stream(tensor.device).stream_id
