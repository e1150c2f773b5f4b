"""Classes made for modules: a module's own class with a forward of ours in front of it."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

_OWN_KEY = "_ampkit_own_class"

_made: weakref.WeakValueDictionary[type, type] = weakref.WeakValueDictionary()


class InFront:
    """Base of what is mixed in before a module's own class."""

    def __init_subclass__(cls, **kwargs):
        # A base that keeps a register of its subclasses, or wants arguments from them, must not hear of ours.
        if _OWN_KEY not in cls.__dict__:
            super().__init_subclass__(**kwargs)


Around = Callable[[Any, Callable[..., Any], tuple, dict], Any]


def put_in_front(own: type, mixin: type[InFront], around: Around, around_method: Around) -> type:
    """A subclass of ``own`` whose forward is ``around(module, own.forward, args, kwargs)``; other methods likewise."""
    if _is_parametrized(own):
        return _parametrized(own, put_in_front(own.__base__, mixin, around, around_method))
    made = _made.get(own)
    if made is None:

        @functools.wraps(own.forward)
        def forward(self, *args, **kwargs):
            return around(self, own.forward, args, kwargs)

        # dynamo keeps graphs by code object, and no more than a few: every class needs its own.
        forward.__code__ = forward.__code__.replace()
        namespace = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
        namespace |= {_OWN_KEY: own, "forward": forward}
        namespace |= {name: _wrapped(own, name, around_method) for name in _methods_of(own)}
        if _lays_out_instances_alone(own):
            bases, settings = (mixin, own), {}
        else:
            bases, settings = (own, mixin), {"metaclass": _second_base_first(type(own))}
        made = types.new_class(own.__name__, bases, settings, lambda names: names.update(namespace))
        _made[own] = made
    return made


def _methods_of(own: type) -> Iterator[str]:
    """The public methods that are the model's own, such as ``generate``: not torch's, and no generators, which begin later."""
    for name in dir(own):
        method = inspect.getattr_static(own, name)
        if name.startswith("_") or hasattr(nn.Module, name) or not isinstance(method, types.FunctionType):
            continue
        begins_later = inspect.isgeneratorfunction(method) or inspect.iscoroutinefunction(method)
        if not begins_later and method.__module__.partition(".")[0] != "torch":
            yield name


def _wrapped(own: type, name: str, around: Around) -> Callable[..., Any]:
    @functools.wraps(getattr(own, name))
    def method(self, *args, **kwargs):
        return around(self, getattr(own, name), args, kwargs)

    method.__code__ = method.__code__.replace()
    return method


def _lays_out_instances_alone(cls: type) -> bool:
    """Whether the instances' dict comes with a class right below object.

    ``class Net(Generic[T], nn.Module)`` has it from below Generic, whose instances have none. To Python these are two layouts, and
    an object changes its class only within one: that of the first base.
    """
    while cls.__base__.__dictoffset__:
        cls = cls.__base__
    return cls.__base__ is object


@functools.cache
def _second_base_first(metaclass: type) -> type:
    """A metaclass for classes that are laid out like their first base, and look for attributes in the second before it."""

    class SecondBaseFirst(metaclass):
        def mro(cls):
            order = super().mro()
            if _OWN_KEY not in cls.__dict__:
                return order
            mixed_in = [base for base in order if issubclass(base, InFront) and base is not cls]
            return [cls, *mixed_in, *(base for base in order[1:] if base not in mixed_in)]

    return SecondBaseFirst


def own_class(cls: type) -> type:
    """What ``cls`` was before `put_in_front`."""
    ours = next((c for c in cls.__mro__ if _OWN_KEY in vars(c)), None)
    if ours is None:
        return cls
    if cls is not ours and _is_parametrized(cls):
        return _parametrized(cls, own_class(cls.__base__))
    return vars(ours)[_OWN_KEY]


def is_made_here(cls: type) -> bool:
    """Whether `put_in_front` made it; not so for a class that a script has derived from such a class."""
    return _OWN_KEY in vars(cls.__base__ if _is_parametrized(cls) else cls)


def _is_parametrized(cls: type) -> bool:
    """Whether torch made the class for one parametrized module: it takes the class back with its first base."""
    return len(cls.__bases__) == 1 and cls.__name__ == f"Parametrized{cls.__base__.__name__}"


def _parametrized(cls: type, base: type) -> type:
    """The class of a parametrized module over another base: where its properties are is where torch removes them."""
    return type(cls)(
        cls.__name__, (base,), {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
    )
