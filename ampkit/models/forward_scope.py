"""Submodules of a model under ``scope="forward"``: called on their own, they are cast as inside of the model's forward.

Each gets a subclass of its own class, whose forward asks for casts where there are none yet.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from ..casting.engine import active_casting
from ..casting.state import number_of_regions
from ..casting.tensors import cast_floating
from .classes import InFront, is_made_here, own_class, put_in_front
from .copies import hand_out_plain_copies, need_no_plain_copies, stand_in


def cast_submodules(model: nn.Module, outputs: Any) -> Callable[[], None]:
    """Have every submodule of ``model`` cast when it is called on its own; returns the undo.

    What leaves such a call is cast to the dtype ``outputs``, or left alone where that is None.
    """
    changed: list[weakref.ref[nn.Module]] = []

    def undo() -> None:
        while changed:
            module = changed.pop()()
            if isinstance(module, _Scoped) and is_made_here(type(module)):
                module.__class__ = own_class(type(module))
                need_no_plain_copies(module)

    try:
        for module in list(model.modules())[1:]:
            if own_class(type(module)) is not type(module):
                continue
            try:
                module.__class__ = put_in_front(type(module), _Scoped, _casting(outputs), outputs)
            except TypeError:  # of a layout that cannot change: a scripted module, which torch.autocast casts
                continue
            hand_out_plain_copies(module)
            changed.append(weakref.ref(module))
    except BaseException:
        undo()
        raise
    return undo


class _Scoped(InFront):
    """Mixed into the class of every submodule, in front of the module's own class."""

    def __prepare_scriptable__(self):
        # Asked for by torch.jit.script, which compiles from source.
        return stand_in(self)


def _casting(outputs: Any) -> Callable:
    def around(module: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> Any:
        casting = active_casting()
        if casting is None or casting.is_on() or number_of_regions() > 0:
            return forward(module, *args, **kwargs)
        with casting.scope_of_forward():
            result = forward(module, *args, **kwargs)
        return result if outputs is None else cast_floating(result, outputs)

    return around
