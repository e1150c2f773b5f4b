"""The O1 engine: puts the wrappers in torch's place, switches casting on and off, and takes everything back.

There is one engine at a time, owned by the sessions at O1. Its ``enabled`` is a plain attribute: backward hooks and
checkpoint recompute run in autograd's own threads and must see what the main thread sees.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import logging
import os
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..compiling import forget_traces, kernels_of_inductor, tag_compiled_code, thread_ident
from ..errors import ConfigurationError
from ..patching import PatchSet
from ..policy import Policy
from ..policy.rules import CastKind, CastRule, kernels, namesakes
from .cache import CastCache
from .calls import FastCalls
from .library import dispatch
from .pickling import patch_picklers
from .rebinding import Rebinding
from .store import CastStore
from .surroundings import patch_surroundings
from .wrappers import wrap

_logger = logging.getLogger("ampkit")

# The engine that is installed now. Decorated functions have to find it, wherever they were decorated.
_active: Casting | None = None

# Rules of the user's, by owner and name. They may be registered before there is an engine, and hold for later ones.
_registered: dict[tuple[int, str], CastRule] = {}


class Casting:
    """Casts of torch's functions by the tables of a policy, from `install` to `close`.

    Tensors are cast on the device types in ``device_types`` only, a set that its owner fills. ``in_python`` leaves the
    library of wrappers in C++ aside.
    """

    def __init__(
        self,
        lower_precision: torch.dtype,
        policy: str | Mapping[str, str] | Policy = "default",
        device_types: Iterable[str] = (),
        verbosity: int = 0,
        in_python: bool = False,
    ) -> None:
        library = None if in_python else dispatch().library
        self.lower_precision = lower_precision
        self.device_types = set(device_types)
        self.policy = Policy.of(policy).settled(min(self.device_types, default="cpu"))
        self.verbosity = verbosity
        self.enabled = False
        # Idents of the threads in which casting is off; empty nearly always.
        self.suspended: set[int] = set()
        #: The wrappers in C++, where that library is loaded.
        self.fast_calls = None if library is None else FastCalls(library, self)
        self._make_store = CastStore if library is None else library.CastStore
        self._installed = False
        self._times_disabled = 0
        self._forwards = 0
        self._traces = 0
        self._bypassed_before: dict[CastCache, bool] = {}
        # Reentrant: garbage collected under it may hold a `disabled` that was never left.
        self._lock = threading.RLock()
        self._caches: dict[torch.dtype, CastCache] = {}
        self._patches = PatchSet()
        self._originals: dict[tuple[int, str], Any] = {}
        self._wrapped_by: dict[int, Any] = {}  # originals by the id of what stands in their place
        self._kinds: dict[tuple[int, str], tuple[Any, str, str]] = {}
        self._tag = ""
        self._rebinding = Rebinding()

    # -- from install to close

    def install(self) -> None:
        """Patch torch. When anything fails midway, torch is as it was before."""
        global _active
        if _active is not None:
            raise ConfigurationError("O1's casts are installed already; close that engine first.")
        rules, dropped = self.policy.rules(_registered.values())
        try:
            for rule in rules:
                self._patch(rule)
            patch_surroundings(self._patches, self)
            patch_picklers(self._patches, self._rebinding.wrapper_of)
            self._rebinding.in_modules()
        except BaseException:
            self._restore()
            raise
        if dropped:
            _logger.debug("This torch has no %s", ", ".join(dropped))
        self._installed = True
        self._describe()
        _active = self
        forget_traces()

    def close(self) -> None:
        """Give torch back as it was found. Wrappers that somebody kept call straight through from now on."""
        global _active
        self._installed = False
        self._switch()
        self.tag_compiled_code()
        self._restore()
        if _active is self:
            _active = None
        forget_traces()

    def register(self, kind: CastKind, owner: Any, name: str) -> None:
        """Put a rule of the user's in place at once; it replaces a rule of the tables for the same function."""
        rule = CastRule(kind, owner, name)
        brought = [CastRule(CastKind.NATIVE, *namesake) for namesake in namesakes(rule)] + kernels(rule)
        for below in brought:
            if (id(below.owner), below.name) not in _registered:
                self._patch(below)
        self._patch(rule)
        self._rebinding.again()
        self._describe()
        forget_traces()

    def cast_on(self, device_types: set[str]) -> None:
        """Cast tensors on these device types and no others."""
        if device_types != self.device_types:
            # A call in another thread must not find none of them.
            self.device_types |= device_types
            self.device_types &= device_types
            self._describe()
            forget_traces()

    def rebind(self, models: Iterable[nn.Module]) -> None:
        """Have the functions of torch that the models hold cast too, whenever they were bound."""
        self._rebinding.in_models(models, self._cast_below())

    def release(self, models: Iterable[nn.Module]) -> None:
        """Undo `rebind` for models whose session ends before the engine."""
        self._rebinding.release(models)

    # -- on and off

    def is_on(self) -> bool:
        """Whether a call made now, in this thread, would be cast."""
        return self.enabled and thread_ident() not in self.suspended

    @contextlib.contextmanager
    def disabled(self, retrace: bool = False) -> Iterator[None]:
        """Casting off for the whole process. May be nested.

        Compiled functions do not see the switch: ``retrace=True`` makes them forget their traces, which is dear. It is
        for a user's own ``disable_casts``; an ``optimizer.step`` has nothing compiled in it that would be cast.
        """
        self._disable(1, retrace)
        try:
            yield
        finally:
            self._disable(-1, retrace)

    @contextlib.contextmanager
    def enabled_again(self) -> Iterator[None]:
        """Casting on inside, however often it was disabled: for a closure inside ``optimizer.step``."""
        times = self._times_disabled
        self._disable(-times)
        try:
            yield
        finally:
            self._disable(times)

    @contextlib.contextmanager
    def suspended_in_thread(self) -> Iterator[None]:
        """Casting off for this thread only: while a batch is fetched, or a model of another level runs."""
        ident = thread_ident()
        if ident in self.suspended:
            yield
            return
        self.suspended.add(ident)
        try:
            yield
        finally:
            self.suspended.discard(ident)

    def _disable(self, times: int, retrace: bool = False) -> None:
        with self._lock:
            before = self.enabled
            self._times_disabled += times
            self._switch()
        if retrace and self.enabled is not before:
            self.tag_compiled_code()
            forget_traces()

    def _switch(self) -> None:
        with self._lock:
            self.enabled = self._installed and self._times_disabled == 0
            if self.fast_calls is not None:
                self.fast_calls.switch()

    def _describe(self) -> None:
        """Put everything on which it depends what is cast into a tag for compiled code."""
        rules = sorted(f"{getattr(owner, '__name__', '')}.{name}={kind}" for owner, name, kind in self._kinds.values())
        digest = hashlib.sha256("".join(rules).encode()).hexdigest()[:16]
        self._tag = f"{self.lower_precision} {sorted(self.device_types)} {digest}"
        self._switch()
        self.tag_compiled_code()

    def _stay_off(self) -> None:
        """For a forked child: what was patched stays in place there, and calls straight through."""
        self._installed = False
        self._lock = threading.RLock()  # a thread of the parent may have held it
        self._switch()
        self.tag_compiled_code()

    # -- the cast cache

    def cache(self, dtype: torch.dtype) -> CastCache:
        """The cache of weights cast to ``dtype``."""
        cache = self._caches.get(dtype)
        if cache is None:
            with self._lock:
                cache = self._caches.setdefault(dtype, CastCache(self._make_store()))
                if self._traces:
                    self._bypassed_before.setdefault(cache, False)
                    cache.bypassed = True
        return cache

    def drop_cache(self, before_backward: bool = False) -> None:
        """Forget all casts of weights; ``before_backward`` tells that no forward pass follows."""
        for cache in self._each_cache():
            cache.drop(before_backward)

    def cached_casts(self) -> dict[Tensor, Tensor]:
        """The casts of weights that are kept now, by weight."""
        return {weight: cast for cache in self._each_cache() for weight, cast in cache.pairs()}

    def forget_casts_of(self, weight: Tensor) -> None:
        """Forget the casts of one weight."""
        for cache in self._each_cache():
            cache.forget(weight)

    @contextlib.contextmanager
    def forward_scope(self) -> Iterator[None]:
        """The forward pass of an initialised model: casts made without grad mode are kept until its outermost end."""
        self._enter_forward(1)
        try:
            yield
        finally:
            self._enter_forward(-1)

    def _enter_forward(self, step: int) -> None:
        with self._lock:
            self._forwards += step
            for cache in self._each_cache():
                cache.keep_without_grad = self._forwards > 0
                if self._forwards == 0:
                    cache.drop_without_grad()

    @contextlib.contextmanager
    def uncached(self) -> Iterator[None]:
        """Weights are cast at every use: what is recorded inside has to contain their casts."""
        with self._lock:
            self._traces += 1
            if self._traces == 1:
                self._bypassed_before = {cache: cache.bypassed for cache in self._each_cache()}
                for cache in self._bypassed_before:
                    cache.bypassed = True
        try:
            yield
        finally:
            with self._lock:
                self._traces -= 1
                if self._traces == 0:
                    for cache, bypassed in self._bypassed_before.items():
                        cache.bypassed = bypassed
                    self._bypassed_before = {}

    def _each_cache(self) -> list[CastCache]:
        """The caches of now: another thread may need one more meanwhile."""
        return list(self._caches.values())

    # -- what else `patch_surroundings` asks for

    def tag_compiled_code(self) -> None:
        """Have code that is compiled now kept on disk apart from code with other casts.

        An optimizer's step, which turns casting off at every iteration, leaves that to the compiler.
        """
        tag_compiled_code(self._tag if self.enabled else "")

    def original_of(self, function: Any) -> Any:
        """torch's own function where one of the wrappers is given, else what was given."""
        return self._wrapped_by.get(id(function), function)

    def give_back_kernels(self) -> None:
        """Have code that inductor generates call torch's own kernels."""
        self._rebinding.give_back(kernels_of_inductor())

    # -- patches

    def _patch(self, rule: CastRule) -> None:
        key = id(rule.owner), rule.name
        self._kinds[key] = rule.owner, rule.name, rule.kind.name
        if rule.kind is CastKind.NATIVE:
            if key in self._originals:  # patched by an earlier rule
                self._patches.set(rule.owner, rule.name, self._originals[key])
                self._rebinding.note(key, self._originals[key], self._originals[key])
            return
        if key not in self._originals:
            self._originals[key] = _stored(rule.owner, rule.name)
        stored = self._originals[key]
        wrapped = self._wrapped(stored, rule)
        self._patches.set(rule.owner, rule.name, wrapped)
        self._rebinding.note(key, stored, wrapped)

    def _cast_below(self) -> list[Callable]:
        """Functions of torch.nn.functional in Python all of whose `namesakes` and `kernels` are cast by the same rule."""
        found = []
        for key, (owner, name, kind) in self._kinds.items():
            if owner is not nn.functional or not isinstance(self._originals.get(key), types.FunctionType):
                continue
            rule = CastRule(CastKind[kind], owner, name)
            below = namesakes(rule) + [(kernel.owner, kernel.name) for kernel in kernels(rule)]
            kinds = {self._kinds.get((id(place), named), (None, None, None))[2] for place, named in below}
            if kinds == {kind}:
                found.append(self._originals[key])
        return found

    def _wrapped(self, stored: Any, rule: CastRule) -> Any:
        if isinstance(stored, (staticmethod, classmethod)):
            return type(stored)(wrap(rule.kind, stored.__func__, self, rule.owner, rule.name))
        wrapper = wrap(rule.kind, stored, self, rule.owner, rule.name)
        self._wrapped_by[id(wrapper)] = stored  # alive as long as the patch is
        return wrapper

    def _restore(self) -> None:
        self._patches.restore()
        self._originals.clear()
        self._kinds.clear()
        self._wrapped_by.clear()
        if self.fast_calls is not None:
            self.fast_calls.close()
        self.drop_cache()
        self._rebinding.undo()


def active_casting() -> Casting | None:
    """The engine that is installed now, if any."""
    return _active


def register_rule(kind: CastKind, owner: Any, name: str) -> None:
    """Remember a rule of the user's for every later engine, and put it into the active one."""
    _registered[id(owner), name] = CastRule(kind, owner, name)
    if _active is not None:
        _active.register(kind, owner, name)


def _stored(owner: Any, name: str) -> Any:
    """What stands at ``owner.name``, as stored: a class keeps its static and class methods as such."""
    if isinstance(owner, dict):
        return owner[name]
    stored = inspect.getattr_static(owner, name, None) if isinstance(owner, type) else None
    return stored if isinstance(stored, (staticmethod, classmethod)) else getattr(owner, name)


def _after_fork_in_child() -> None:
    global _active
    if _active is not None:
        _active._stay_off()
        _active = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
