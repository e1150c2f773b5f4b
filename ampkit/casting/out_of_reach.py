"""Functions of torch that O1 cannot replace where others hold them, found to be told of: in closures, defaults, classes."""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import nn

from .swapping import Swap, is_left_alone, loaded_modules


def out_of_reach(swap: Swap, models: Iterable[nn.Module] = (), searched: Collection[str] = ()) -> list[str]:
    """Names of the functions and classes that hold an old function where it is not replaced.

    Modules named in ``searched`` are left out, but for ``__main__``, which grows.
    """
    found: list[str] = []
    for name, namespace in loaded_modules():
        if name in searched and name != "__main__":
            continue
        for value in list(namespace.values()):
            if type(value) is types.FunctionType:
                if value.__module__ == name and not swap.gives(value):
                    _search_function(swap, value, found)
            elif issubclass(type(value), type) and vars(value).get("__module__") == name:
                _search_class(swap, value, found)
    for cls in {cls for model in models for module in model.modules() for cls in type(module).__mro__}:
        if not is_left_alone(str(cls.__module__)):
            _search_class(swap, cls, found)
    return list(dict.fromkeys(found))


def _search_class(swap: Swap, cls: type, found: list[str]) -> None:
    for name, value in list(vars(cls).items()):
        if type(value) is staticmethod or type(value) is classmethod:
            value = value.__func__
        if swap.holds(value):
            found.append(f"{cls.__module__}.{cls.__qualname__}.{name} (in the class)")
        elif type(value) is types.FunctionType:
            _search_function(swap, value, found)


def _search_function(swap: Swap, function: types.FunctionType, found: list[str]) -> None:
    for value in _cells(function) if function.__closure__ is not None else ():
        if swap.holds(value):
            found.append(f"{function.__module__}.{function.__qualname__} (in its closure)")
        elif type(value) is types.FunctionType and value.__module__ == function.__module__:  # what was decorated
            _search_defaults(swap, value, found)
    _search_defaults(swap, function, found)


def _search_defaults(swap: Swap, function: types.FunctionType, found: list[str]) -> None:
    defaults, named = function.__defaults__, function.__kwdefaults__
    if defaults is None and named is None:
        return
    for value in (*(defaults or ()), *(named or {}).values()):
        if swap.holds(value):
            found.append(f"{function.__module__}.{function.__qualname__} (as a default)")


def _cells(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__:
        try:
            yield cell.cell_contents
        except ValueError:  # still empty
            pass
