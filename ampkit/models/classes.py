"""Methods that stand in the places of those of a model's own class, as long as models of the class are initialized.

``type(model)`` stays what the script has made, and so does what it asks of it: ``isinstance``, ``super()``, pickles by name. A
method of ours calls the class's own for every instance that is not initialized.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from ..patching import SharedPatches, Undo, shared_patch

Around = Callable[[Any, Callable[..., Any], tuple, dict], Any]
"""Called with the instance, the class's own method, and the arguments of a call."""

_patched: dict[tuple[type, str], SharedPatches] = {}


def stand_before(cls: type, methods: Mapping[str, Around], undo: Undo, of_public: Around | None = None) -> None:
    """Have calls of these methods of a class go through what stands beside their names, until ``undo``.

    Calls of the public methods that are the class's own go through ``of_public``. All who ask for a method name the same.
    """
    while _is_parametrized(cls):  # torch takes the class back with the last parametrization
        cls = cls.__base__
    public = () if of_public is None else _public_methods_of(cls)
    for name, around in {**dict.fromkeys(public, of_public), **methods}.items():
        if (cls, name) not in _patched:
            _patched[cls, name] = shared_patch(lambda: cls, name, functools.partial(_calling, cls, name, around))
        _patched[cls, name].acquire()
        undo.callback(_release, cls, name)


def _release(cls: type, name: str) -> None:
    if _patched[cls, name].release():
        del _patched[cls, name]


def _public_methods_of(cls: type) -> Iterator[str]:
    """The public methods that are the model's own, such as ``generate``: not torch's, and no generators, which begin later."""
    for name in dir(cls):
        method = inspect.getattr_static(cls, name)
        if name.startswith("_") or hasattr(nn.Module, name) or not isinstance(method, types.FunctionType):
            continue
        begins_later = inspect.isgeneratorfunction(method) or inspect.iscoroutinefunction(method)
        if not begins_later and method.__module__.partition(".")[0] != "torch":
            yield name


def _calling(cls: type, name: str, around: Around, own: Callable[..., Any] | None) -> Callable[..., Any]:
    stored = inspect.getattr_static(cls, name, None)
    if stored is not None and not isinstance(stored, types.FunctionType):  # a static method, a property

        def own(self, *args, **kwargs):
            return stored.__get__(self, type(self))(*args, **kwargs)

    def method(self, *args, **kwargs):
        return around(self, own, args, kwargs)

    # dynamo keeps graphs by code object, and no more than a few: every class needs its own. torch.jit.script compiles the source of
    # the own method, with the globals of this one.
    code, names = method.__code__.replace(), getattr(own, "__globals__", globals())
    method = types.FunctionType(code, names, name, None, method.__closure__)
    return method if own is None else functools.wraps(own)(method)


def _is_parametrized(cls: type) -> bool:
    """Whether torch made the class for one parametrized module."""
    return len(cls.__bases__) == 1 and cls.__name__ == f"Parametrized{cls.__base__.__name__}"
