"""Functions of torch that others bound before O1 patched them, and that a patch of torch therefore does not reach.

``from torch.nn.functional import linear``, ``self.act = F.gelu``, ``partial(F.softmax, dim=-1)`` and
``ACT2FN = {"gelu": F.gelu}`` hold the original. `EarlyBound` puts the engine's wrapper in its place, in attributes of loaded
modules and of the models' submodules: directly, in a `functools.partial`, or one level deep in a list, dict (as a key,
too), tuple, dataclass or `types.SimpleNamespace`. The same walk with the map turned round is the undo: no place is
remembered, nothing is kept alive, and what was bound while torch was patched is given back too. What cannot be reached
(closures, defaults, class dictionaries) is logged by name, except functions that are cast by what they call: losses, say.

The walk runs no code of others: namespaces are read below ``__getattr__``, so that lazy modules stay unloaded.
"""

from __future__ import annotations

import functools
import gc
import logging
import sys
import types
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import Any

from torch import nn

from .cpp_wrappers import is_held_by_others, tables_of_dynamo

_logger = logging.getLogger("ampkit")

# torch's own modules find their functions in the places that are patched, ours hold originals on purpose, and Python's
# know nothing of torch.
_LEFT_ALONE = frozenset({"torch", "ampkit", "functorch", "torchgen"}) | sys.stdlib_module_names - {"__main__"}

# Tables of functions are short, and vocabularies need not be searched.
_LONGEST_CONTAINER = 4096

_MODULE_STATE = frozenset({"__builtins__", "__warningregistry__"})
_OWN_STATE = frozenset(vars(nn.Module()))

_Handler = Callable[["Swap", Any], Any]


# What was searched for functions out of reach, and what was logged: a second initialize need not do it again.
_searched: set[str] = set()
_logged: set[str] = set()


class EarlyBound:
    """The functions of one engine, and who holds them: `note` each patch, then `in_modules` and `in_models`, at last `undo`."""

    def __init__(self) -> None:
        self._originals: dict[Hashable, Any] = {}
        self._standing: dict[Hashable, Any] = {}
        self._retired: list[tuple[Any, Hashable]] = []
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._by_original: dict[int, Any] = {}

    def note(self, place: Hashable, original: Any, function: Any) -> None:
        """``function`` stands now where ``original`` stood. Of several wrappers of one original the newest is handed out."""
        if type(original) in (staticmethod, classmethod):
            original, function = original.__func__, getattr(function, "__func__", function)
        if not callable(original) or isinstance_of(original, type):  # a class is asked for with isinstance, too
            return
        before = self._standing.pop(place, original)
        if before is not original and before is not function:
            self._retired.append((before, place))
        self._originals[place], self._standing[place] = original, function
        self._by_original[id(original)] = function

    def wrapper_of(self, original: Any) -> Any | None:
        """What stands in the place of a function of torch now, or None."""
        return self._by_original.get(id(original))

    def in_modules(self) -> None:
        """Have all that loaded modules hold cast."""
        swap_in_modules(self._swap())

    def in_models(self, models: Iterable[nn.Module], cast_below: Iterable[Callable] = ()) -> None:
        """Have all that the models' submodules hold cast, and log what stays as it was.

        Originals ``cast_below`` are cast by what they call, wherever they are held.
        """
        swap, models = self._swap(), list(models)
        self._models.update(models)
        swap_in_models(swap, models)
        uncast = self._swap(left_out=cast_below)
        found = [name for name in out_of_reach(uncast, models, _searched) if name not in _logged]
        _searched.update(name for name, _ in _loaded_modules())
        _logged.update(found)
        if found:
            _logger.info(
                "Bound before initialize() where O1 cannot rebind it, and not cast there: %s", ", ".join(found)
            )

    def again(self) -> None:
        """After further patches: have all that holds what they replaced follow."""
        self.in_modules()
        swap_in_models(self._swap(), self._models)

    def release(self, models: Iterable[nn.Module]) -> None:
        """Give models back what they held."""
        swap_in_models(Swap(self._undo_pairs()), models)
        self._models.difference_update(models)

    def give_back(self, namespace: dict[str, Any]) -> None:
        """Put originals in the place of wrappers in the values of a dict that is to hold torch's own."""
        Swap(self._undo_pairs()).in_namespace(namespace)

    def undo(self) -> None:
        """Give everybody back what they held. Call it last: wrappers that are still alive then are looked for in the whole heap."""
        pairs = self._undo_pairs()
        swap = Swap(pairs)
        swap_in_modules(swap)
        swap_in_models(swap, self._models)
        references = [(weakref.ref(f), original) for f, original in pairs if isinstance_of(f, types.FunctionType)]
        lasting = [(f, original) for f, original in pairs if not isinstance_of(f, types.FunctionType)]
        del swap, pairs
        for record in (self._originals, self._standing, self._retired, self._by_original, self._models):
            record.clear()
        held = [(function, original) for ref, original in references if (function := ref()) is not None]
        held += [(function, original) for function, original in lasting if is_held_by_others(function)]
        if held:
            swap_in_holders(Swap(held))

    def _swap(self, left_out: Iterable[Callable] = ()) -> Swap:
        left_out = set(map(id, left_out))
        standing = reversed([place for place in self._standing if id(self._originals[place]) not in left_out])
        newest_first = [(self._originals[place], self._standing[place]) for place in standing]
        retired = [(function, self._standing[place]) for function, place in self._retired]
        return Swap(newest_first + retired, keep_keys=True)

    def _undo_pairs(self) -> list[tuple[Any, Any]]:
        functions = [(function, place) for place, function in self._standing.items()] + self._retired
        return [(f, self._originals[place]) for f, place in functions if f is not self._originals[place]]


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
    for _, namespace in _loaded_modules():
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


def out_of_reach(swap: Swap, models: Iterable[nn.Module] = (), searched: Collection[str] = ()) -> list[str]:
    """Names of the functions and classes that hold an old function where it is not replaced.

    Modules named in ``searched`` are left out, but for ``__main__``, which grows.
    """
    found: list[str] = []
    for name, namespace in _loaded_modules():
        if name in searched and name != "__main__":
            continue
        for value in list(namespace.values()):
            if type(value) is types.FunctionType:
                if value.__module__ == name and not swap.gives(value):
                    _search_function(swap, value, found)
            elif issubclass(type(value), type) and vars(value).get("__module__") == name:
                _search_class(swap, value, found)
    for cls in {cls for model in models for module in model.modules() for cls in type(module).__mro__}:
        if str(cls.__module__).partition(".")[0] not in _LEFT_ALONE:
            _search_class(swap, cls, found)
    return list(dict.fromkeys(found))


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


def _loaded_modules() -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, namespace) of every loaded module that is to be searched, each once."""
    seen = set()
    for key, module in list(sys.modules.items()):
        if module is None or str(key).partition(".")[0] in _LEFT_ALONE:
            continue
        namespace = namespace_of(module)
        if namespace is None or id(namespace) in seen:
            continue
        seen.add(id(namespace))
        name = namespace.get("__name__")
        name = name if type(name) is str else str(key)
        if name.partition(".")[0] not in _LEFT_ALONE:  # torch and ampkit under another name
            yield name, namespace


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
