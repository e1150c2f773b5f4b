"""The state that decides how a call is cast: the switch of each thread, torch.autocast's own, and the kept casts (NOTES.md).

Every wrapper reads `CastingState`; the engine (engine.py) derives from it, and sets it. A weight is cast once in a call of an
initialized model, and a stale cast is never used: csrc/casting/cast_store.h says how long a cast lives. Without that library
there is no store, and a weight is cast at every use.

Note [plain places]
    torch restores a thread's state at the end of some scopes: inference mode, a region, a backward pass, Python code that a
    call of the dispatcher runs. So a thread is set for good only at a plain place: outside of all these, where dispatching
    excludes no more than in a new thread. An engine that closes elsewhere switches off at once. Its wrappers stay in
    place and switch off again what torch restores, until the first of them is called at a plain place.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import profiler

from .. import patching
from ..dtypes import LOWER_PRECISION

#: The float32 value (models/float32_values.py) of every weight that a live session stores in lower precision; None for parameters
#: beside these that no optimizer trains, which keep their dtype.
stored = patching.by_tensor()

_dynamo_compiling = torch.compiler.is_dynamo_compiling
_compiler = torch.compiler
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_enabled = torch.is_autocast_enabled
_dtype_of = torch.get_autocast_dtype
_compiling = torch.compiler.is_compiling


class CastingState:
    """The state that the wrappers of one engine read on every call.

    ``lower_precision`` is the session's. ``control`` is told the same, for the wrappers in C++, where there are any.
    """

    #: Switches this thread off where the engine, now closed, has left it on.
    leave: Callable[[], None]
    #: Called where a float16 region of the script casts a call that has gradients, if a session does not scale its loss.
    on_float16_region: Callable[[], None] | None = None

    def __init__(
        self, lower_precision: torch.dtype, verbosity: int, caches: CastCaches, control: Any | None = None
    ) -> None:
        self.lower_precision = lower_precision
        self.verbosity = verbosity
        self.caches = caches
        #: Device types whose tensors are cast. Those that torch.autocast does not know ("meta") are cast where any others are.
        self.device_types: frozenset[str] = frozenset()
        #: Those of them that torch.autocast has a state for.
        self.autocast_types: tuple[str, ...] = ()
        #: Whether the engine casts at all.
        self.installed = False
        #: Whether models have narrow results.
        self.stores = False
        #: Whether the engine was closed. Its wrappers may stay in place for a while: see Note [plain places].
        self.closed = False
        self._torchs_choice: dict[str, torch.dtype] = {}
        self.control = control

    def tell_wrappers(self) -> None:
        """Let wrappers follow what was set: ``device_types``, ``installed``, ``stores``."""
        self.autocast_types = tuple(filter(_is_known, sorted(self.device_types)))
        self._torchs_choice = {device_type: default_precision(device_type) for device_type in self.autocast_types}
        if self.control is not None:
            choices = list(self._torchs_choice.values())
            others = tuple(self.device_types.difference(self.autocast_types))
            self.control.set(self.installed, self.stores, self.autocast_types, choices, others, self.lower_precision)

    def is_on(self) -> bool:
        """Whether a call made now, in this thread, is cast."""
        if not self.installed:
            if self.closed and not _compiling():
                self.leave()
            return False
        for device_type in self.autocast_types:
            if _is_enabled(device_type):
                return True
        return False

    def region_for(self, tensors: Iterable[Tensor]) -> AbstractContextManager[Any] | None:
        """A region for a call with these arguments where casts are off; None if it is not cast (models/NOTES.md)."""
        lower = [x.dtype for x in tensors if x.dtype in LOWER_PRECISION]
        holds = lower and self.stores and self.installed and number_of_regions() == 0
        return self.region(True, lower[0], narrow=True) if holds else None

    def in_float32(self, weight: Tensor) -> Tensor:
        """The float32 value of a weight that is stored in lower precision; other tensors unchanged."""
        if weight.dtype not in LOWER_PRECISION:
            return weight
        value = None if _compiling() else stored.get(weight)
        return weight.float() if value is None else _Float32.apply(weight, value)

    def casts_on(self, device_type: str) -> bool:
        """Whether tensors on devices of this type are cast now, in this thread, where `is_on`."""
        if device_type not in self.autocast_types:
            return device_type in self.device_types
        return _is_enabled(device_type)

    def other_precision(self) -> torch.dtype | None:
        """The dtype of a torch.autocast region, where it is neither the session's nor what torch has by default."""
        for device_type in self.autocast_types:
            dtype = _dtype_of(device_type)
            if dtype is not self.lower_precision and _is_enabled(device_type):
                is_chosen = dtype is not self._torchs_choice[device_type] or self.is_narrow()
                return dtype if dtype in LOWER_PRECISION and is_chosen else None
        return None

    def is_narrow(self) -> bool:
        """Whether softmax, norms and powers return their input's precision."""
        return self.stores and torch.is_autocast_cache_enabled()

    def region(
        self, enabled: bool, dtype: torch.dtype | None = None, narrow: bool = False
    ) -> AbstractContextManager[Any]:
        """A region of torch.autocast for every device type of the session: a `Region`, or torch's own in a trace."""
        dtype = dtype or self.lower_precision
        if not _compiling():
            return Region(self, enabled, dtype, narrow)
        if len(self.autocast_types) == 1:
            return torch.autocast(self.autocast_types[0], dtype, enabled, cache_enabled=narrow)
        return _traced_regions(self.autocast_types, enabled, dtype, narrow)

    def mark_regions(self) -> None:
        """Make dynamo's guards tell a region without casts from a thread that was never switched on: see ampkit/NOTES.md."""
        if not any(_is_enabled(device_type) for device_type in self.autocast_types):
            torch.set_autocast_cache_enabled(number_of_regions() == 0)

    def restore(self, saved: Saved) -> None:
        """Restore the state from `save`, unless the engine was closed since: the garbage collector may end a session anywhere."""
        restore(switched_on.get(threading.get_ident(), saved) if self.closed else saved)
        if self.closed:
            self.leave()


class _Float32(torch.autograd.Function):
    """An autograd node from a stored weight to its float32 value; the gradient goes to the weight, in its dtype."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, value: Any) -> Tensor:
        ctx.dtype = weight.dtype
        return value.current(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


class Region:
    """A context manager like torch.autocast, for all device types of an engine, without its cache and its checks."""

    __slots__ = ("_before", "_dtype", "_enabled", "_narrow", "_state")

    def __init__(self, state: CastingState, enabled: bool, dtype: torch.dtype, narrow: bool = False) -> None:
        self._state = state
        self._enabled = enabled
        self._dtype = dtype
        self._narrow = narrow

    def __enter__(self) -> Region:
        self._before, regions = save(self._state.autocast_types), number_of_regions()
        try:
            torch.autocast_increment_nesting()
            switch(self._state.autocast_types, self._enabled, self._dtype, self._narrow)
            return self
        except BaseException:  # KeyboardInterrupt comes between any two lines
            if number_of_regions() > regions:
                self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        try:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
        finally:
            self._state.restore(self._before)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the region for a while, for a closure inside ``optimizer.step``."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()


@contextlib.contextmanager
def _traced_regions(device_types: Sequence[str], enabled: bool, dtype: torch.dtype, narrow: bool) -> Iterator[None]:
    with contextlib.ExitStack() as regions:
        for device_type in device_types:
            regions.enter_context(torch.autocast(device_type, dtype, enabled, cache_enabled=narrow))
        yield


def number_of_regions() -> int:
    """The number of regions of torch.autocast that this thread is in; in a trace, a constant."""
    # One expression, which nothing interrupts: the first number is never 0.
    return torch.autocast_increment_nesting() and torch.autocast_decrement_nesting()


# As torch.compiler.assume_constant_result does, without importing dynamo for it.
number_of_regions._dynamo_marked_constant = True


def is_plain_place() -> bool:
    """Whether this thread is in no scope that restores its state at the end: see Note [plain places]."""
    in_backward = torch._C._current_graph_task_id() != -1
    if number_of_regions() > 0 or in_backward or torch.is_inference_mode_enabled() or _this_thread.left_modes > 0:
        return False
    return _excluded() | _excluded_at_rest() == _excluded_at_rest()


#: The dispatch keys that this thread excludes: torch.autocast's if that is off, and more inside of a dispatcher's call.
_excluded = torch._C._dispatch_tls_local_exclude_set


class _ThisThread(threading.local):
    left_modes = 0  # the number of blocks of `out_of_modes` that the thread is in
    kept: tuple[Tensor, ...] = ()  # the weights of `CastCaches.keep`


_this_thread = _ThisThread()


@contextlib.contextmanager
def out_of_modes() -> Iterator[None]:
    """Leave inference mode and torch.func's transforms for a while: models and optimizers keep the tensors that are made inside."""
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if not transformed and not torch.is_inference_mode_enabled():
        yield
        return
    _this_thread.left_modes += 1
    try:
        with torch.inference_mode(False), temporarily_clear_interpreter_stack() if transformed else nullcontext():
            yield
    finally:
        _this_thread.left_modes -= 1


Saved = tuple[dict[str, tuple[bool, torch.dtype]], bool]

#: The states of threads, by ident, before they were switched on for good. They outlive the engine: only a thread itself can switch
#: itself off, and only at a plain place for good.
switched_on: dict[int, Saved] = {}


def save(device_types: Sequence[str]) -> Saved:
    """Read this thread's state, for `restore`."""
    return {x: (_is_enabled(x), _dtype_of(x)) for x in device_types}, torch.is_autocast_cache_enabled()


def switch(device_types: Sequence[str], enabled: bool, dtype: torch.dtype, narrow: bool = False) -> None:
    """Set this thread's state. torch's own cache, which goes stale where regions are not nested, is on where results are narrow."""
    for device_type in device_types:
        torch.set_autocast_enabled(device_type, enabled)
        torch.set_autocast_dtype(device_type, dtype)
    torch.set_autocast_cache_enabled(narrow)


def restore(saved: Saved) -> None:
    """Undo `switch`."""
    states, cache_enabled = saved
    for device_type, (enabled, dtype) in states.items():
        torch.set_autocast_enabled(device_type, enabled)
        torch.set_autocast_dtype(device_type, dtype)
    torch.set_autocast_cache_enabled(cache_enabled)


def past_autocast(function: Callable, state: CastingState) -> Callable:
    """Wrap a function of torch so that torch.autocast does not cast its arguments once more, by its own list."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if _compiling():
            with state.region(False):
                return function(*args, **kwargs)
        on = [device_type for device_type in state.autocast_types if _is_enabled(device_type)]
        try:
            for device_type in on:
                torch.set_autocast_enabled(device_type, False)
            return function(*args, **kwargs)
        finally:  # a region of the script's own goes on even where the engine was closed since
            if state.closed and number_of_regions() == 0:
                state.leave()
            else:
                for device_type in on:
                    torch.set_autocast_enabled(device_type, True)

    return call


@functools.cache
def default_precision(device_type: str) -> torch.dtype:
    """The dtype that torch.autocast casts to on this device type by default, with which every new thread starts."""
    return _in_a_new_thread(lambda: _dtype_of(device_type))


@functools.cache
def _excluded_at_rest() -> Any:
    return _in_a_new_thread(_excluded)


def _in_a_new_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    # Not one of an executor, which has none for a thread that outlives the main one.
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def _is_known(device_type: str) -> bool:
    """Whether torch.autocast has a state for devices of this type."""
    try:
        return torch.amp.is_autocast_available(device_type)
    except RuntimeError:
        return False


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

    @contextlib.contextmanager
    def keep(self, weights: tuple[Tensor, ...]) -> Iterator[None]:
        """Keep casts of these weights that this thread makes inside. The script promises no writes that torch does not count."""
        if self._store_class is None:
            yield
            return
        number, outer = next(_numbers), _this_thread.kept
        _this_thread.kept = (*outer, *weights)
        before = self._store_class.set_kept(number, _this_thread.kept)
        try:
            yield
        finally:
            _this_thread.kept = outer
            self._store_class.set_kept(before, outer)
            for store in self._stores:
                store.end(number)

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


_numbers = itertools.count(1)  # of calls


class Call:
    """The context manager of `CastCaches.call`."""

    __slots__ = ("_number", "_region", "_store_class", "_stores")

    def __init__(self, caches: CastCaches, region: AbstractContextManager[Any]) -> None:
        self._store_class, self._stores = caches._store_class, caches._stores
        self._region = region
        self._number = 0  # stays 0 inside of another call of its thread

    def __enter__(self) -> None:
        self._number = next(_numbers)
        try:
            if not self._store_class.begin_call(self._number):
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
            self._store_class.end_call(self._stores, self._number)
