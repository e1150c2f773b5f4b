"""The weight-cast cache: each weight is cast once, and a stale cast is never used.

The O1 engine owns one cache per target dtype and decides when it is dropped; the wrappers ask it for casts of weights.
An entry holds as long as the weight's version counter and storage are what they were. Writes that torch itself does
not count (``p.data.mul_()``, a numpy view) move neither, and are unseen until the cache is dropped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import Parameter

# Bound once: each is asked on every call with a weight.
_grad_enabled = torch.is_grad_enabled
_inference_mode = torch.is_inference_mode_enabled
_compiling = torch.compiler.is_compiling


class _Entry(NamedTuple):
    weight: weakref.ref[Tensor]
    version: int
    data_ptr: int
    requires_grad: bool
    cast: Tensor
    storage: torch.UntypedStorage  # kept alive, so that no other storage can come to lie at data_ptr


class CastCache:
    """Casts of weights to one dtype.

    Casts made with and without grad mode, and in inference mode, are kept apart: one that autograd did not record is
    useless for training, and one that it did would keep a graph alive through an evaluation.

    Keys are weak, yet a cast that autograd recorded leads back to its weight and so keeps it alive until the next drop.
    """

    def __init__(self) -> None:
        self.casts_made = 0
        # Set by the engine while a forward pass of one of its models runs.
        self.keep_without_grad = False
        # Set by the engine while torch.jit traces: asking torch on every call would cost as much as the look-up.
        self.bypassed = False
        self._with_grad: dict[int, _Entry] = {}
        self._without_grad: dict[int, _Entry] = {}
        self._in_inference: dict[int, _Entry] = {}

    def __len__(self) -> int:
        return len(self._with_grad) + len(self._without_grad) + len(self._in_inference)

    def cast(self, weight: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
        """The kept cast of ``weight``, or ``convert(weight)``, which is kept where that is safe."""
        # A trace must contain the cast: a tensor from outside would be frozen into it.
        if self.bypassed or _compiling():
            return convert(weight)
        if _grad_enabled():
            entries = self._with_grad
        else:
            entries = self._in_inference if _inference_mode() else self._without_grad
        entry = entries.get(id(weight))
        if entry is not None:
            known, version, data_ptr, requires_grad, cast, _ = entry
            if (
                known() is weight
                and weight._version == version
                and weight.data_ptr() == data_ptr
                and weight.requires_grad is requires_grad
            ):
                return cast
        return self._cast_anew(weight, convert, entries)

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Every weight that has a cast here, with it."""
        entries = [entry for kept in self._kept for entry in kept.values()]
        return [(weight, entry.cast) for entry in entries if (weight := entry.weight()) is not None]

    def forget(self, weight: Tensor) -> None:
        """Forget the casts of one weight."""
        for kept in self._kept:
            kept.pop(id(weight), None)

    @property
    def _kept(self) -> tuple[dict[int, _Entry], ...]:
        return self._with_grad, self._without_grad, self._in_inference

    def drop(self) -> None:
        """Forget every cast."""
        self._with_grad.clear()
        self.drop_without_grad()

    def drop_without_grad(self) -> None:
        """Forget the casts of evaluation: they never outlive the forward pass they were made in."""
        self._without_grad.clear()
        self._in_inference.clear()

    def _cast_anew(self, weight: Tensor, convert: Callable[[Tensor], Tensor], entries: dict[int, _Entry]) -> Tensor:
        cast = convert(weight)
        if cast is weight:  # on a device that is not the session's
            return cast
        self.casts_made += 1
        recording = entries is self._with_grad
        if (recording or self.keep_without_grad) and _is_plain(weight, cast, recording):
            key = id(weight)

            def forget(dead: weakref.ref) -> None:
                # The id may belong to another weight by now.
                if key in entries and entries[key].weight is dead:
                    del entries[key]

            entries[key] = _Entry(
                weakref.ref(weight, forget),
                weight._version,
                weight.data_ptr(),
                weight.requires_grad,
                cast,
                weight.untyped_storage(),
            )
        return cast


def is_weight(tensor: Tensor) -> bool:
    """Whether casts of ``tensor`` are worth keeping: exactly a parameter.

    Other leaves that require gradients are inputs, which scripts edit through ``.data`` (adversarial examples, style
    transfer). Subclasses (fake and distributed tensors among them) carry more than a storage and a version.
    """
    return type(tensor) is Parameter


def _is_plain(weight: Tensor, cast: Tensor, recording: bool) -> bool:
    """Whether the cast means the same to a later caller.

    It does not when it belongs to a transform of torch.func or to a fake mode that is active now, when it was made in
    inference mode with grad mode on, or when the weight has no version counter or no storage to watch.
    """
    return (
        type(cast) is Tensor
        and not is_functorch_wrapped_tensor(cast)
        and not is_functorch_wrapped_tensor(weight)
        and not (recording and cast.is_inference())
        and not weight.is_inference()
        and weight.layout is torch.strided
    )
