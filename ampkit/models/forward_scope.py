"""Submodules of a model under ``scope="forward"``: called on their own, they are cast as inside of the model's forward.

Each gets a subclass of its own class, made here, whose forward asks for casts where there are none yet. Copies and pickles
are of the module's own class again: they belong to no session.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from ..casting.engine import active_casting
from ..casting.state import number_of_regions
from ..casting.tensors import cast_floating

_classes: weakref.WeakValueDictionary[type, type] = weakref.WeakValueDictionary()


def cast_submodules(model: nn.Module, outputs: Any) -> Callable[[], None]:
    """Have every submodule of ``model`` cast when it is called on its own; returns the undo.

    What leaves such a call is cast to the dtype ``outputs``, or left alone where that is None.
    """
    changed: list[tuple[weakref.ref[nn.Module], type]] = []

    def undo() -> None:
        while changed:
            ref, scoped = changed.pop()
            module = ref()
            if module is not None and type(module) is scoped:
                module.__class__ = scoped.__mro__[2]

    try:
        for module in list(model.modules())[1:]:
            if "_ampkit_shell" in vars(type(module)) or "_ampkit_scoped" in vars(type(module)):
                continue
            scoped = _scoped_class(type(module), outputs)
            try:
                module.__class__ = scoped
            except TypeError:  # of a layout that cannot change: a scripted module, which torch.autocast casts
                continue
            changed.append((weakref.ref(module), scoped))
    except BaseException:
        undo()
        raise
    return undo


class _Scoped:
    """Mixed into the class of every submodule, in front of the module's own class."""

    def __init_subclass__(cls, **kwargs):
        # A base that keeps a register of its subclasses, or wants arguments from them, must not hear of ours.
        if "_ampkit_scoped" not in cls.__dict__:
            super().__init_subclass__(**kwargs)

    def __prepare_scriptable__(self):
        # Asked for by torch.jit.script, which compiles from source.
        own = type(self).__mro__[2]
        twin = own.__new__(own)
        twin.__dict__.update(self.__dict__)
        return twin

    def __reduce_ex__(self, protocol):
        function, arguments, *rest = super().__reduce_ex__(protocol)
        if arguments and arguments[0] is type(self):
            # Not by copyreg's own function: pickle checks the class that it is given.
            return (_new, (type(self).__mro__[2], *arguments[1:]), *rest)
        return (function, arguments, *rest)


def _new(cls: type, *arguments: object) -> nn.Module:
    return cls.__new__(cls, *arguments)


def _scoped_class(base: type, outputs: Any) -> type:
    scoped = _classes.get(base)
    if scoped is None or scoped._ampkit_scoped is not outputs:

        @functools.wraps(base.forward)
        def forward(self, *args, **kwargs):
            casting = active_casting()
            if casting is None or casting.is_on() or number_of_regions() > 0:
                return base.forward(self, *args, **kwargs)
            with casting.scope_of_forward():
                result = base.forward(self, *args, **kwargs)
            return result if type(self)._ampkit_scoped is None else cast_floating(result, type(self)._ampkit_scoped)

        # dynamo keeps graphs by code object, and no more than a few: every class needs its own.
        forward.__code__ = forward.__code__.replace()
        namespace = {
            "_ampkit_scoped": outputs,
            "forward": forward,
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
        }
        scoped = types.new_class(base.__name__, (_Scoped, base), exec_body=lambda ns: ns.update(namespace))
        _classes[base] = scoped
    return scoped
