"""Replacing objects by identity, wherever loaded modules, models or the whole heap hold them.

The walk runs no code of others: namespaces are read below ``__getattr__``, so that lazy modules stay unloaded.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from .cpp_wrappers import tables_of_dynamo

# torch's own modules find their functions in the places that are patched, ours hold originals on purpose, and Python's
# know nothing of torch.
_LEFT_ALONE = frozenset({"torch", "ampkit", "functorch", "torchgen"}) | sys.stdlib_module_names - {"__main__"}

# Tables of functions are short, and vocabularies need not be searched.
_LONGEST_CONTAINER = 4096

_MODULE_STATE = frozenset({"__builtins__", "__warningregistry__"})
_OWN_STATE = frozenset(vars(nn.Module()))

_Handler = Callable[["Swap", Any], Any]


class Swap:
    """What is to be replaced by what, by identity. Of several replacements for one object the first counts.

    With ``keep_keys`` a dict's keys stay beside those that replace them: where functions are looked up by identity, in a
    table of a ``__torch_function__`` for instance, torch hands out the original of what is compiled and the wrapper of the rest.
    """

    def __init__(self, pairs: Iterable[tuple[Any, Any]], keep_keys: bool = False) -> None:
        self._keep_keys = keep_keys
        self._new: dict[int, Any] = {}
        self._old: list[Any] = []  # an id means something while its object lives
        self._handlers = _Handlers()
        for old, new in pairs:
            if old is not new and id(old) not in self._new:
                self._new[id(old)] = new
                self._old.append(old)
        self._given = set(map(id, self._new.values()))

    def __len__(self) -> int:
        return len(self._old)

    def gives(self, value: Any) -> bool:
        """Whether ``value`` is put in the place of something, which it may hold for its own use."""
        return id(value) in self._given

    def holds(self, value: Any) -> bool:
        """Whether ``value`` is to be replaced, or is a partial or a table with something that is."""
        if id(value) in self._new:
            return True
        if self._handlers[type(value)] is None:
            return False
        if type(value) is functools.partial:
            return not self._new.keys().isdisjoint(map(id, _parts(value)))
        elements = _elements(value)
        if functools.partial in set(map(type, elements)):
            elements = [part for x in elements for part in (_parts(x) if type(x) is functools.partial else (x,))]
        return not self._new.keys().isdisjoint(map(id, elements))

    def in_namespace(self, namespace: dict[str, Any], skipped: frozenset[str] = frozenset()) -> None:
        """Replace in the values of a dict; other threads may write to it meanwhile."""
        new, handlers = self._new, self._handlers
        for name, value in list(namespace.items()):
            if id(value) in new:
                replacement = new[id(value)]
            else:
                handler = handlers[type(value)]
                if handler is None or name in skipped or not self.holds(value):
                    continue
                replacement = handler(self, value)
            if replacement is not value and namespace.get(name) is value:
                namespace[name] = replacement

    def _element(self, value: Any) -> Any:
        if type(value) is functools.partial:
            return self._in_partial(value)
        return self._new.get(id(value), value)

    def _in_partial(self, value: functools.partial) -> functools.partial:
        function, args, keywords = value.func, value.args, value.keywords
        new = self._new
        if not new.keys().isdisjoint(map(id, _parts(value))):
            function = new.get(id(function), function)
            args = tuple(new.get(id(x), x) for x in args)
            keywords = {name: new.get(id(x), x) for name, x in keywords.items()}
            # In place: whoever else holds this partial means the same function.
            value.__setstate__((function, args, keywords, vars(value) or None))
        return value

    def _in_dict(self, value: dict) -> dict:
        for key, element in list(dict.items(value)):
            replacement = self._element(element)
            if replacement is not element:
                dict.__setitem__(value, key, replacement)
            if id(key) in self._new:
                dict.setdefault(value, self._new[id(key)], replacement)
                if not self._keep_keys:
                    dict.pop(value, key, None)
        return value

    def _in_list(self, value: list) -> list:
        for index, element in enumerate(list.copy(value)):
            replacement = self._element(element)
            if replacement is not element:
                list.__setitem__(value, index, replacement)
        return value

    def _in_tuple(self, value: tuple) -> tuple:
        elements = [self._element(x) for x in tuple.__iter__(value)]
        if all(x is y for x, y in zip(elements, tuple.__iter__(value))):
            return value
        return tuple.__new__(type(value), elements)

    def _in_record(self, value: Any) -> Any:
        self._in_dict(namespace_of(value))
        return value


_HANDLERS = (
    (functools.partial, Swap._in_partial),
    (dict, Swap._in_dict),
    (list, Swap._in_list),
    (tuple, Swap._in_tuple),
    (types.SimpleNamespace, Swap._in_record),
)


class _Handlers(dict[type, "_Handler | None"]):
    """By class, how to replace inside an object: handlers return it, or what shall stand in its place. None for most."""

    def __missing__(self, cls: type) -> _Handler | None:
        handler = next((handler for base, handler in _HANDLERS if issubclass(cls, base)), None)
        if handler is None and any("__dataclass_fields__" in vars(c) for c in cls.__mro__):
            handler = Swap._in_record
        self[cls] = handler
        return handler


def swap_in_modules(swap: Swap) -> None:
    """Replace in the attributes of every loaded module outside torch and ampkit."""
    for _, namespace in loaded_modules():
        swap.in_namespace(namespace, skipped=_MODULE_STATE)


def swap_in_models(swap: Swap, models: Iterable[nn.Module]) -> None:
    """Replace in the attributes of every submodule of the models."""
    for model in models:
        for module in model.modules():
            swap.in_namespace(vars(module), skipped=_OWN_STATE)


def swap_in_holders(swap: Swap) -> None:
    """Replace in every attribute, list and dict of the process that holds one of the few old functions still.

    This walks the heap, once. It is for the undo: copies of a model, say, that were made while torch was patched.
    """
    left_alone = {id(swap._old), *map(id, tables_of_dynamo())}
    for holder in gc.get_referrers(*swap._old):
        if id(holder) in left_alone or (type(holder) is dict and "__torch_dynamo_original__" in holder):
            continue
        if type(holder) is functools.partial:
            swap._in_partial(holder)
        elif type(holder) is list:
            swap._in_list(holder)
        elif type(holder) is dict:
            swap.in_namespace(holder)
            swap._in_dict(holder)
        elif not isinstance_of(holder, (types.FrameType, types.FunctionType, types.ModuleType, type, tuple)):
            # Since Python 3.11 an object may hold its attributes without a dict.
            namespace = namespace_of(holder)
            if namespace is not None:
                swap.in_namespace(namespace)


def loaded_modules() -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, namespace) of every loaded module that is to be searched, each once."""
    seen = set()
    for key, module in list(sys.modules.items()):
        if module is None or is_left_alone(str(key)):
            continue
        namespace = namespace_of(module)
        if namespace is None or id(namespace) in seen:
            continue
        seen.add(id(namespace))
        name = namespace.get("__name__")
        name = name if type(name) is str else str(key)
        if not is_left_alone(name):  # torch and ampkit under another name
            yield name, namespace


def is_left_alone(name: str) -> bool:
    """Whether nothing is replaced in a module of this name."""
    return name.partition(".")[0] in _LEFT_ALONE


def namespace_of(thing: Any) -> dict[str, Any] | None:
    """The ``__dict__`` of an object, whatever its class does about attributes; None where there is no plain one."""
    try:
        namespace = object.__getattribute__(thing, "__dict__")
    except Exception:
        return None
    return namespace if type(namespace) is dict else None


def isinstance_of(value: Any, classes: type | tuple[type, ...]) -> bool:
    """isinstance() that goes by the type alone: proxies answer for ``__class__`` by loading what they stand for."""
    return issubclass(type(value), classes)


def _parts(value: functools.partial) -> tuple[Any, ...]:
    return value.func, *value.args, *value.keywords.values()


def _elements(value: Any) -> list[Any]:
    """What a list, tuple, dict or record holds; nothing where that is too much to search."""
    if isinstance_of(value, tuple):
        found = tuple.__getitem__(value, slice(None, _LONGEST_CONTAINER + 1))
    elif isinstance_of(value, list):
        found = list.__getitem__(value, slice(None, _LONGEST_CONTAINER + 1))
    else:
        fields = value if isinstance_of(value, dict) else namespace_of(value) or {}
        found = (*dict.values(fields), *dict.keys(fields)) if dict.__len__(fields) <= _LONGEST_CONTAINER else ()
        return list(found)
    return list(found) if len(found) <= _LONGEST_CONTAINER else []
