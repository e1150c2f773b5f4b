"""Pickling of torch's own functions while wrappers stand in their places.

Pickle writes a Python function as the name of its place, and refuses when something else stands there. Objects that
hold an original, bound before (a model, a dataset that goes to a spawned worker), shall be pickled all the same, and load
anywhere: such a function is written as ``copy.copy(torch.nn.functional.softmax)``, by the wrapper's name, which leaves
functions as they are.

The pickler in C writes functions by name, but in a subclass with ``reducer_override``. So ``pickle.Pickler`` becomes one while
torch is patched, and the subclasses that exist get the method.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from types import FunctionType
from typing import Any

from ..patching import PatchSet


def patch_picklers(patches: PatchSet, wrapper_of: Callable[[Any], Any | None]) -> None:
    """Have picklers write a function by the name of what ``wrapper_of`` says stands in its place (None: by its own)."""

    def reducer_override(self: pickle.Pickler, thing: Any) -> Any:
        if type(thing) is not FunctionType:
            return NotImplemented
        wrapper = wrapper_of(thing)
        return NotImplemented if wrapper is None or wrapper is thing else (copy.copy, (wrapper,))

    plain = pickle.Pickler
    for cls in (*plain.__subclasses__(), pickle._Pickler):
        if "reducer_override" not in vars(cls):
            patches.set(cls, "reducer_override", reducer_override)
    namespace = {"reducer_override": reducer_override, "__module__": "pickle", "__doc__": plain.__doc__}
    pickler = type("Pickler", (plain,), namespace)
    patches.set(pickle, "Pickler", pickler)

    @functools.wraps(pickle.dump)
    def dump(obj: Any, file: Any, protocol: int | None = None, **settings: Any) -> None:
        pickler(file, protocol, **settings).dump(obj)

    @functools.wraps(pickle.dumps)
    def dumps(obj: Any, protocol: int | None = None, **settings: Any) -> bytes:
        file = io.BytesIO()
        pickler(file, protocol, **settings).dump(obj)
        return file.getvalue()

    patches.set(pickle, "dump", dump)
    patches.set(pickle, "dumps", dumps)
