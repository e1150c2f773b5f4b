"""The engine of every level that casts: it patches torch with the wrappers, switches casting on and off, and restores torch.

There is one engine at a time, owned by the sessions that cast. state.py reads whether a thread's calls are cast. It is
set here: by `install` for its thread, and by the forward of an initialized model for others.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import sys
import threading
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.compiler import config

from .. import patching
from ..compiling import compiled_models, forget_traces
from ..errors import ConfigurationError
from ..patching import PatchSet
from ..policy import TABLES, Policy
from ..policy.cast_rules import CastKind, CastRule, is_loaded
from .cpp_wrappers import library, remind_dynamo
from .state import CastCaches, CastingState, is_plain_place, number_of_regions, restore, save, switch, switched_on
from .torch_integration import patch_torch
from .wrappers import CAST_BY_AUTOCAST, wrap

_compiling = torch.compiler.is_compiling
_TAG = " ampkit: "

# The engine that is installed now. Decorated functions have to find it, wherever they were decorated.
_active: Casting | None = None

# The user's rules, by owner and name. They may be registered before there is an engine, and hold for later ones.
_registered: dict[tuple[int, str], CastRule] = {}

# The last engine that was closed. Its wrappers stay in place until all threads are switched off.
_leaving: Casting | None = None

# The engine of a forked child's parent, whose wrappers stay in place until another is installed.
_forked: Casting | None = None


class Casting(CastingState):
    """Casts of torch's functions by the tables of a policy, from `install` to `close`.

    Tensors are cast on the device types in ``device_types`` only. ``scope`` "process" casts every call of the thread that
    installs, "forward" only those inside `forward_scope`. ``in_python`` leaves the wrappers in C++ aside.
    """

    def __init__(
        self,
        lower_precision: torch.dtype,
        policy: str | Mapping[str, str] | Policy = "default",
        device_types: Iterable[str] = (),
        verbosity: int = 0,
        in_python: bool = False,
        scope: str = "process",
    ) -> None:
        control = None if library is None or in_python else library.Switch()
        super().__init__(
            lower_precision, verbosity, CastCaches(None if library is None else library.CastStore), control
        )
        self.leave = switch_off_left_on
        self.device_types = frozenset(device_types)
        self.policy = Policy.of(policy).for_device(min(device_types, default="cpu"))
        self.scope = scope
        #: Whether it also casts in the forward of models of other levels, as `amp.init` of the drop-in asks.
        self.covers_every_model = False
        self._patches = PatchSet()
        self._originals: dict[tuple[int, str], Any] = {}
        self._wrapped_by: dict[int, Any] = {}  # originals by the id of their wrapper
        self._wrappers: dict[int, Any] = {}  # wrappers by the id of their original
        self._rules: dict[tuple[int, str], CastRule] = {}
        self._own: dict[tuple[int, str], CastRule] = {}  # rules of the user's that came after `install`
        self._awaited: tuple[str, ...] = ()  # packages that have rows, and are not loaded yet
        self._out_of_date: set[int] = set()  # threads that were in a region when the device types changed

    def install(self) -> None:
        """Patch torch, or restore it when anything fails midway."""
        global _active
        if _active is not None:
            raise ConfigurationError("O1's casts are installed already; close that engine first.")
        _restore_torch()
        if _forked is not None:
            _forked._restore()
        remind_dynamo()
        collects = gc.isenabled()
        gc.disable()  # a collection, where large libraries are loaded, takes ten times as long as all of this
        try:
            self._follow_rules()
            patch_torch(self._patches, self)
            self.installed = True
            self.tell_wrappers()
            _active = self
            self.switch_on_here()
            compiled_models.before_each_call(self.mark_regions)
            forget_traces()
        except BaseException:
            self.close()
            raise
        finally:
            if collects:
                gc.enable()

    def close(self) -> None:
        """Restore torch's functions. Wrappers that a script has kept call these from now on.

        Where a thread cannot be switched off for good yet, wrappers stay in place until it can: see Note [plain places].
        """
        global _active, _leaving
        self.stores = False
        self._end()
        compiled_models.not_before_calls(self.mark_regions)
        self.tag_compiled_code()
        if _active is self:
            _active = None
        _leaving = self
        switch_off_left_on()
        if _leaving is self:
            forget_traces()
            compiled_models.before_each_call(switch_off_left_on)
        if threading.main_thread().ident in switched_on:
            _switch_main_thread_off()

    def _end(self) -> None:
        self.installed, self.closed = False, True
        self.tell_wrappers()

    def register(self, kind: CastKind, owner: Any, name: str) -> None:
        """Apply a rule of the user's at once; it wins over all others for the same function."""
        self._own[id(owner), name] = CastRule(kind, owner, name)
        self._follow_rules()
        forget_traces()

    def catch_up(self) -> None:
        """Apply the rows of packages that were loaded since `install`."""
        # In nearly every forward the first test decides, and calls no Python function.
        if not sys.modules.keys().isdisjoint(self._awaited) and any(map(is_loaded, self._awaited)):
            self._follow_rules()
            forget_traces()

    def rules(self) -> list[CastRule]:
        """The rules that hold now."""
        return self.policy.rules(_registered.values(), self._own.values())

    def _follow_rules(self) -> None:
        """Patch the functions whose rules are others than before, and await packages whose rows are left out."""
        packages = {group.package for group in TABLES[self.policy.base]}
        self._awaited = tuple(sorted(package for package in packages if not is_loaded(package)))
        for rule in self.rules():
            if self._rules.get((id(rule.owner), rule.name)) != rule:
                self._patch(rule)
        self.tell_wrappers()

    def cast_on(self, device_types: Iterable[str], stores: bool | None = None) -> None:
        """Cast tensors on these device types and no others; ``stores`` says whether models have narrow results."""
        before, self.device_types = self.device_types, frozenset(device_types)
        self.stores = self.stores if stores is None else stores
        self.tell_wrappers()
        if before != self.device_types:
            if threading.get_ident() in switched_on:
                self._out_of_date.add(threading.get_ident())
                self._bring_up_to_date()
            forget_traces()

    def _bring_up_to_date(self) -> None:
        """Switch this thread to the current settings where no region of the script's own decides; for good at a plain place."""
        if threading.get_ident() in self._out_of_date and number_of_regions() == 0:
            self._out_of_date.discard(threading.get_ident())
            self._switch_off_here()
            self.switch_on_here()

    @property
    def leaves_out_this_thread(self) -> bool:
        """Whether calls of other threads are cast everywhere, and those of this thread in the forward of models only."""
        is_everywhere = self.scope == "process" and self.installed and bool(switched_on)
        return is_everywhere and threading.get_ident() not in switched_on and number_of_regions() == 0

    def disabled(self) -> AbstractContextManager[Any]:
        """A region in which no calls of this thread are cast: a `Region`, or torch's own in a trace."""
        return self.region(False)

    def forward_scope(self, narrow_in: torch.dtype | None = None) -> AbstractContextManager[Any]:
        """The context of an initialized model's forward pass, which is cast unless a region of the script says otherwise.

        ``narrow_in`` is the precision of its calls where they have narrow results. A trace does without the cache.
        """
        if self._out_of_date and not _compiling():
            self._bring_up_to_date()
        region: AbstractContextManager[Any] = nullcontext()
        if self.installed and self.is_on():  # for calls of every model, or for those of the one around this
            fits = self.is_narrow() and (self.other_precision() or self.lower_precision) is narrow_in
            if narrow_in is not None and not fits:
                region = self.region(True, narrow_in, narrow=True)
        elif self.installed and number_of_regions() == 0:
            region = self.region(True, narrow_in, narrow=narrow_in is not None)
        return region if _compiling() else self.caches.call(region)

    def end_scope_of_process(self) -> None:
        """Cast in the forward of models only, from now on."""
        self.scope = "forward"
        self._switch_off_here()

    def pause(self, paused: bool) -> None:
        """Switch casting off in every thread until further notice, or on again, as a script of Apex's may ask."""
        if not self.closed and self.installed is paused:
            self.installed = not paused
            self.tell_wrappers()
            if paused:
                self._switch_off_here()
            else:
                self.switch_on_here()

    def switch_on_here(self) -> None:
        """Cast every call of this thread from now on, if that is the engine's scope."""
        if self.scope == "process" and self.installed:
            ident, types_now = threading.get_ident(), self.autocast_types
            if number_of_regions() == 0:
                before, _ = switched_on.setdefault(ident, save(()))
                before.update(save(types_now)[0] | before)
                switch(types_now, True, self.lower_precision)
            if not is_plain_place():
                self._out_of_date.add(ident)

    def _switch_off_here(self) -> None:
        _switch_off()
        if threading.get_ident() in switched_on:
            self._out_of_date.add(threading.get_ident())

    def _stay_off(self) -> None:
        """Switch casting off in a forked child: wrappers stay in place there, and call torch's functions."""
        self._end()
        switch_off_left_on()
        for device_type in self.autocast_types:  # in the midst of a forward, too
            torch.set_autocast_enabled(device_type, False)
        self.tag_compiled_code()

    def tag_compiled_code(self) -> None:
        """Tag code that this thread compiles now with all that decides which calls are cast: it is kept on disk apart."""
        rules = [f"{getattr(rule.owner, '__name__', '')}.{rule.name}={rule.kind.name}" for rule in self._rules.values()]
        digest = hashlib.sha256("".join(sorted(rules)).encode()).hexdigest()[:16]
        precisions = f"{self.lower_precision} {self.other_precision() or ''}"
        tag = f"{_TAG}{precisions} {sorted(self.device_types)} {digest}" if self.is_on() else ""
        config.cache_key_tag = config.cache_key_tag.partition(_TAG)[0] + tag

    def original_of(self, function: Any) -> Any:
        """The function of torch under a wrapper; anything but a wrapper unchanged."""
        return self._wrapped_by.get(id(function), function)

    def wrapper_of(self, original: Any) -> Any | None:
        """The wrapper that replaces a function of torch's, or None."""
        return self._wrappers.get(id(original))

    def _patch(self, rule: CastRule) -> None:
        key = id(rule.owner), rule.name
        self._rules[key] = rule
        is_left_alone = rule.kind is CastKind.NATIVE and rule.name not in CAST_BY_AUTOCAST
        if is_left_alone and key not in self._originals:
            return
        stored = self._originals.setdefault(key, _stored(rule.owner, rule.name))
        is_special = isinstance(stored, (staticmethod, classmethod))
        function = stored.__func__ if is_special else stored
        # What an earlier rule has patched may be left alone by a later one.
        wrapper = function if is_left_alone else wrap(rule, function, self, self._patches)
        self._wrapped_by[id(wrapper)], self._wrappers[id(function)] = function, wrapper
        self._patches.set(rule.owner, rule.name, type(stored)(wrapper) if is_special else wrapper)

    def _restore(self) -> None:
        self._patches.restore()
        for known in (self._originals, self._rules, self._wrapped_by, self._wrappers):
            known.clear()
        self.caches.drop()


def active_casting() -> Casting | None:
    """The engine that is installed now, if any."""
    return _active


def register_rule(kind: CastKind, owner: Any, name: str) -> None:
    """Remember a rule of the user's for every later engine, and apply it in the active one."""
    _registered[id(owner), name] = CastRule(kind, owner, name)
    if _active is not None:
        _active.register(kind, owner, name)


def switch_off_left_on() -> None:
    """Switch this thread off where a closed engine has left it on. Public functions and leftover wrappers call it."""
    if (not switched_on and _leaving is None) or _active is not None or _compiling():
        return
    if number_of_regions() == 0:  # else the region's end restores the state before it
        _switch_off()
    for gone in switched_on.keys() - sys._current_frames().keys():
        del switched_on[gone]
    if not switched_on and patching.changing.acquire(blocking=False):
        try:
            _restore_torch()
        finally:
            patching.changing.release()


def _switch_off() -> None:
    """Restore the state of this thread from before it was switched on; for good at a plain place."""
    if (before := switched_on.get(threading.get_ident())) is not None:
        restore(before)
        if is_plain_place():
            del switched_on[threading.get_ident()]


def _restore_torch() -> None:
    """Restore the functions of torch that the last engine has left wrapped."""
    global _leaving
    engine, _leaving = _leaving, None
    if engine is not None:
        compiled_models.not_before_calls(switch_off_left_on)
        engine._restore()
        remind_dynamo()
        forget_traces()


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
def _switch_off_pending(_: Any) -> int:
    """Switch the main thread off; Python calls this there, between two instructions."""
    switch_off_left_on()
    if threading.get_ident() in switched_on and _active is None:  # at no plain place: look again
        again = threading.Timer(0.05, _switch_main_thread_off)
        again.daemon = True
        again.start()
    return 0


def _switch_main_thread_off() -> None:
    ctypes.pythonapi.Py_AddPendingCall(_switch_off_pending, None)


def _stored(owner: Any, name: str) -> Any:
    """The attribute of ``owner``, as stored: a class keeps its static and class methods as such."""
    if isinstance(owner, dict):
        return owner[name]
    stored = next((vars(cls)[name] for cls in getattr(owner, "__mro__", ()) if name in vars(cls)), None)
    return stored if isinstance(stored, (staticmethod, classmethod)) else getattr(owner, name)


def _after_fork_in_child() -> None:
    global _active, _forked
    if _active is not None:
        _forked, _active = _active, None
        _forked._stay_off()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
