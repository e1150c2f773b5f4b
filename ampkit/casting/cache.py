"""The cast cache: each weight is cast once, and a stale cast is never used.

The engine owns one cache per target dtype and decides when it is dropped; the wrappers ask it for casts of weights. An
entry holds as long as the version counters and the storage of the weight are what they were.
Writes that torch itself does not count move neither. So the engine forgets a parameter's casts, and those of all
activations, when a script asks for ``.data``, ``numpy()`` or ``__dlpack__()``. A write through one of these that the script
has kept from before is unseen until the cache is dropped.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import Parameter

from ..labels import labelled
from .store import CastStore

# Bound once: each is asked on every call with a weight.
_grad_enabled = torch.is_grad_enabled
_dynamo_compiling = torch.compiler.is_dynamo_compiling
_compiler = torch.compiler
_dispatch_modes = torch._C._len_torch_dispatch_stack


class CastCache:
    """Casts of weights to one dtype.

    Keys are weak, yet a cast that autograd recorded leads back to its weight and so keeps it alive until the next drop.
    """

    #: How many dispatch modes only watch: a cast that they do not see being made is nothing that they miss.
    watchers = 0

    def __init__(self, store: CastStore) -> None:
        #: A `CastStore`, or its twin in C++.
        self.store = store
        if torch.cuda.is_available():
            self.store.capturing = torch.cuda.is_current_stream_capturing
        self._find = self.store.find

    def cast(self, weight: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
        """The kept cast of ``weight``, or ``convert(weight)``, which is kept where that is safe."""
        # A tensor from outside would be frozen into a trace or a CUDA graph, and a mode that counts or saves operations would
        # miss the cast.
        if _dynamo_compiling() or _compiler._is_compiling_flag:
            return convert(weight)
        store = self.store
        if store.bypassed or _dispatch_modes() > self.watchers or (store.capturing is not None and store.capturing()):
            return convert(weight)
        cast = self._find(weight)
        return self._cast_anew(weight, convert) if cast is None else cast

    @labelled("cast weights")
    def _cast_anew(self, weight: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
        store = self.store
        # The storage stays alive until the stamp is compared, so that no other comes to lie at its address.
        made_of = (store.stamp(weight), weight.untyped_storage()) if _is_plain(weight) else None
        cast = convert(weight)
        if cast is weight:  # on a device that is not the session's
            return cast
        store.casts_made += 1
        recording = _grad_enabled()
        if made_of is not None and (recording or store.keep_without_grad) and _means_the_same(cast, recording):
            store.keep(weight, cast, made_of[0])
        return cast


class CastCaches:
    """The caches of one engine, one for each dtype, made by ``make_store`` when first asked for."""

    def __init__(self, make_store: Callable[[], CastStore]) -> None:
        self._make_store = make_store
        self._caches: dict[torch.dtype, CastCache] = {}
        self._forwards = 0
        self._bypasses = 0
        # Reentrant: garbage that is collected under it may come here again.
        self._lock = threading.RLock()

    def of(self, dtype: torch.dtype) -> CastCache:
        """The cache of tensors cast to ``dtype``."""
        cache = self._caches.get(dtype)
        if cache is None:
            with self._lock:
                cache = self._caches.setdefault(dtype, CastCache(self._make_store()))
                self._tell_stores()
        return cache

    def _tell_stores(self) -> None:
        for store in self._stores():
            store.keep_without_grad, store.bypassed = self._forwards > 0, self._bypasses > 0

    def drop(self, before_backward: bool = False) -> None:
        """Forget all casts of weights; ``before_backward`` tells that no forward pass follows."""
        for cache in list(self._caches.values()):  # another thread may need one more meanwhile
            cache.store.drop(before_backward=before_backward)

    def pairs(self) -> dict[Tensor, Tensor]:
        """The casts of weights that are kept now, by weight."""
        return {weight: cast for store in self._stores() for weight, cast in store.pairs()}

    def forget(self, tensor: Tensor) -> None:
        """Forget the casts of one tensor, and of all activations, before a write that torch does not count."""
        for store in self._stores():
            store.forget(tensor)

    def enter_forward(self) -> None:
        """The forward pass of an initialized model begins: casts made without grad mode are kept until its outermost end."""
        with self._lock:
            self._forwards += 1
            if self._forwards == 1:
                self._tell_stores()

    def leave_forward(self) -> None:
        """Undo `enter_forward`."""
        with self._lock:
            self._forwards -= 1
            if self._forwards == 0:
                self._tell_stores()
                for store in self._stores():
                    store.drop_without_grad()

    def bypass(self, more: int = 1) -> None:
        """Have weights be cast at every use from now on, or with -1 take that back."""
        with self._lock:
            self._bypasses += more
            self._tell_stores()

    @contextlib.contextmanager
    def bypassed(self) -> Iterator[None]:
        """Weights are cast at every use: what is recorded inside has to contain their casts."""
        self.bypass()
        try:
            yield
        finally:
            self.bypass(-1)

    def renew_lock(self) -> None:
        """For a forked child: a thread of the parent may have held the lock."""
        self._lock = threading.RLock()

    def _stores(self) -> list[CastStore]:
        """Those of now: another thread may need one more meanwhile."""
        return [cache.store for cache in list(self._caches.values())]


def is_weight(tensor: Tensor) -> bool:
    """Whether casts of ``tensor`` are worth keeping: exactly a parameter.

    Other leaves that require gradients are inputs, which scripts edit through ``.data`` (adversarial examples, style
    transfer). Subclasses (fake and distributed tensors among them) carry more than a storage and a version.
    """
    return type(tensor) is Parameter


def _is_plain(weight: Tensor) -> bool:
    """Whether the weight has a version counter and a storage of its own to watch."""
    return (
        weight.layout is torch.strided
        and not weight.is_inference()
        and not is_functorch_wrapped_tensor(weight)
        and torch._C._has_storage(weight)
    )


def _means_the_same(cast: Tensor, recording: bool) -> bool:
    """Whether the cast means the same to a later caller.

    It does not when it belongs to a transform of torch.func or to a fake mode that is active now, or when it was made in
    inference mode with grad mode on.
    """
    return type(cast) is Tensor and not is_functorch_wrapped_tensor(cast) and not (recording and cast.is_inference())
