"""Attribute writes on objects of torch and scripts, each with its undo.

A `PatchSet` undoes its writes in reverse order. Everything that ampkit changes outside of itself (functions of torch,
methods of an optimizer) goes through one; sessions and the engine of casts hold them.
"""

from __future__ import annotations

import functools
import os
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

_INHERITED = object()

#: Held while torch, models and optimizers are changed or restored: one `initialize` or `close` at a time, whatever its thread.
changing = threading.RLock()


def renew_lock() -> None:
    """Replace the lock in a forked child: a thread of the parent may have held it."""
    global changing
    changing = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=renew_lock)


def own_attribute(owner: Any, name: str) -> Any:
    """The attribute as stored on ``owner`` itself, or a marker when it is inherited or computed.

    Tensor methods live on ``TensorBase`` and are inherited by ``torch.Tensor``, methods of an optimizer by the instance
    from its class: what was not there before must be deleted, not written back, or a stray entry stays.
    """
    namespace = owner if isinstance(owner, dict) else vars(owner)
    return namespace.get(name, _INHERITED)


class Reference(weakref.ref):
    """A weak reference to a tensor or another object. It refers to the object even if torch swaps the tensor's contents."""

    __slots__ = ()


class _ById(WeakIdRef):
    __slots__ = ()


def by_tensor() -> WeakIdKeyDictionary:
    """A dictionary whose keys are tensors, held by weak references that let torch swap their contents."""
    return WeakIdKeyDictionary(ref_type=_ById)


def _foreign(tensor: Any) -> list[weakref.ref]:
    """The weak references to a tensor that are neither ampkit's nor those of a cast store, whose callback is in C++."""
    refs = [ref for ref in weakref.getweakrefs(tensor) if not isinstance(ref, (Reference, _ById))]
    return [ref for ref in refs if getattr(ref.__callback__, "__module__", None) != "ampkit._casting"]


class Undo(ExitStack):
    """A stack of undo functions. All run, the latest first, whatever fails; the first error is raised at the end."""

    def callback(self, undo: Callable[..., Any], *args: Any) -> None:
        def run(_: Any, first: BaseException | None, __: Any) -> None:
            try:
                undo(*args)
            except BaseException:
                if first is None:
                    raise

        self.push(run)

    def if_alive(self, undo: Callable[[Any], Any], thing: Any) -> None:
        """Register ``undo(thing)``, which is skipped if the thing is gone by then."""
        ref = Reference(thing)
        self.callback(lambda: (alive := ref()) is None or undo(alive))


def run_all(undos: Iterable[tuple[Any, ...]]) -> None:
    """Call each of these functions with its arguments, whatever fails on the way; the first error is raised at the end."""
    with Undo() as stack:
        for undo, *args in reversed(list(undos)):
            stack.callback(undo, *args)


class PatchSet(Undo):
    """Attribute writes that can be undone."""

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Write ``owner.name = value`` (``owner[name]`` for a dict) and remember the value before."""
        before = own_attribute(owner, name)
        _write(owner, name, value)
        self.callback(_put_back, owner, name, before, value)

    def put_around(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Wrap ``owner.name``: each call becomes ``around(original, *args, **kwargs)``."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        self.set(owner, name, call)

    def restore(self) -> None:
        """Undo every write, newest first. A value that others have written over it since stays."""
        self.close()


def _put_back(owner: Any, name: str, before: Any, written: Any) -> None:
    if own_attribute(owner, name) is written:
        _write(owner, name, before)


class SharedPatches:
    """Patches that several users share: ``patch(patches)`` runs for the first of them, and is undone after the last."""

    def __init__(self, patch: Callable[[PatchSet], None]) -> None:
        self._patch = patch
        self._users = 0
        self._patches = PatchSet()

    def acquire(self, undo: Undo) -> None:
        """Patch for one more user, until its ``undo``."""
        if not self._users:
            with PatchSet() as patches:
                self._patch(patches)
                self._patches = patches.pop_all()
        self._users += 1
        undo.callback(self._release)

    def _release(self) -> None:
        self._users -= 1
        if not self._users:
            self._patches.restore()


def _write(owner: Any, name: str, value: Any) -> None:
    if value is _INHERITED:
        if isinstance(owner, dict):
            del owner[name]
        else:
            delattr(owner, name)
    elif isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)


#: torch swaps the contents of parameters (in ``model.to()`` of wrapper classes, or with ``set_swap_module_params_on_conversion``)
#: if it finds no weak reference to them. This patch hides ampkit's.
swaps = SharedPatches(lambda patches: patches.set(torch.utils, "weakref", types.SimpleNamespace(getweakrefs=_foreign)))
