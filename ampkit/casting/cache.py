"""The cast cache: a weight is cast once in a call of an initialized model, and a stale cast is never used.

The engine owns one store per target dtype, ampkit._casting.CastStore; csrc/casting/cast_store.h says how long a cast lives. Without
that library there is no store, and a weight is cast at every use.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from .. import patching
from ..dtypes import LOWER_PRECISION

_dynamo_compiling = torch.compiler.is_dynamo_compiling
_compiler = torch.compiler
_dispatch_modes = torch._C._len_torch_dispatch_stack


class CastCaches:
    """The stores of one engine, one for each lower precision; none where ``store_class``, ampkit._casting.CastStore, is None."""

    #: The number of dispatch modes that only watch: they need not see casts.
    watchers = 0

    def __init__(self, store_class: Any) -> None:
        self._store_class = store_class
        dtypes = () if store_class is None else LOWER_PRECISION
        self._by_dtype = {dtype: store_class() for dtype in dtypes}
        self._stores = tuple(self._by_dtype.values())
        if torch.cuda.is_available():
            for store in self._stores:
                store.capturing = torch.cuda.is_current_stream_capturing
        self._bypasses = 0
        self._kept = _Kept()

    def of(self, dtype: torch.dtype) -> Any | None:
        """The store of tensors cast to ``dtype``, if there are any."""
        return self._by_dtype.get(dtype)

    def cast(self, dtype: torch.dtype, weight: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
        """The kept cast of a weight to ``dtype``, or a new one, made by ``convert`` and kept where that is safe."""
        # A tensor from outside would be frozen into a trace or a CUDA graph, and a mode that counts or saves operations
        # would miss the cast.
        if _dynamo_compiling() or _compiler._is_compiling_flag:
            return convert(weight)
        if (store := self.of(dtype)) is None:
            with profiler.record_function("ampkit: cast weights") if profiler._is_profiler_enabled else nullcontext():
                return convert(weight)
        if store.bypassed or _dispatch_modes() > self.watchers or (store.capturing and store.capturing()):
            return convert(weight)
        cast: Tensor = store.cast(weight, convert)
        return cast

    def call(self, region: AbstractContextManager[Any] | None = None) -> AbstractContextManager[None]:
        """A context for a call of an initialized model or its method, in a region: casts of weights live to the outermost's end."""
        region = region or nullcontext()
        return region if self._store_class is None else Call(self, region)

    def end(self, number: int) -> None:
        """End the call, or `keep`, with this number."""
        for store in self._stores:
            store.end(number)

    @contextlib.contextmanager
    def keep(self, weights: tuple[Tensor, ...]) -> Iterator[None]:
        """Keep casts of these weights that this thread makes inside. The script promises no writes that torch does not count."""
        if self._store_class is None:
            yield
            return
        kept, number = self._kept, next(_numbers)
        outer = kept.weights
        kept.weights = (*outer, *weights)
        before = self._store_class.set_kept(number, kept.weights)
        try:
            yield
        finally:
            kept.weights = outer
            self._store_class.set_kept(before, outer)
            self.end(number)

    def keep_all(self) -> None:
        """Keep casts to the next `drop`, wherever they are made, as the handle of Apex's ``amp.init`` does."""
        for store in self._stores:
            store.keeps_all = True

    def keep_to_step(self, weights: tuple[Tensor, ...]) -> None:
        """Keep casts of these weights to the next `drop`, after a micro-batch with ``delay_unscale=True``."""
        for store in self._stores:
            store.keep_to_step(weights)

    def drop_ended(self) -> None:
        """Leave the casts of calls that have ended to autograd, which frees each after its use: a backward pass begins."""
        for store in self._stores:
            store.drop_ended()

    def drop(self) -> None:
        """Forget all casts of weights: a step has written to them."""
        for store in self._stores:
            store.drop()

    def pairs(self) -> dict[Tensor, Tensor]:
        """The casts of weights that are kept now, by weight."""
        return {weight: cast for store in self._stores for weight, cast in store.pairs()}

    def forget(self, tensor: Tensor) -> None:
        """Forget the casts of weights in a tensor's memory, and of all activations, before a write that torch does not count."""
        for store in self._stores:
            store.forget(tensor)

    def bypass(self, more: int = 1) -> None:
        """Cast weights at every use from now on, or undo that with -1."""
        with patching.changing:
            self._bypasses += more
            for store in self._stores:
                store.bypassed = self._bypasses > 0

    @contextlib.contextmanager
    def bypassed(self) -> Iterator[None]:
        """Cast weights at every use inside: a graph that is recorded there has to contain their casts."""
        self.bypass()
        try:
            yield
        finally:
            self.bypass(-1)


_numbers = itertools.count(1)


class _Kept(threading.local):
    weights: tuple[Tensor, ...] = ()


class Call:
    """The context manager of `CastCaches.call`."""

    __slots__ = ("_caches", "_number", "_region", "_set")

    def __init__(self, caches: CastCaches, region: AbstractContextManager[Any]) -> None:
        self._caches = caches
        self._set = caches._store_class.set_call
        self._region = region
        self._number = 0  # stays 0 inside of another call of its thread

    def __enter__(self) -> None:
        self._number = next(_numbers)
        try:
            if outer := self._set(self._number):
                self._set(outer)
                self._number = 0
            self._region.__enter__()
        except BaseException:  # KeyboardInterrupt comes between any two lines
            self._leave()
            raise

    def __exit__(self, *error: object) -> None:
        try:
            self._region.__exit__(*error)
        finally:
            self._leave()

    def _leave(self) -> None:
        if self._number:
            self._set(0)
            self._caches.end(self._number)
