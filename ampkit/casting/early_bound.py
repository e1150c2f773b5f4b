"""Functions of torch that others bound before O1 patched them, and that a patch of torch therefore does not reach.

``from torch.nn.functional import linear``, ``self.act = F.gelu``, ``partial(F.softmax, dim=-1)`` and
``ACT2FN = {"gelu": F.gelu}`` hold the original. `EarlyBound` puts the engine's wrapper in its place, in attributes of loaded
modules and of the models' submodules: directly, in a `functools.partial`, or one level deep in a list, dict (as a key,
too), tuple, dataclass or `types.SimpleNamespace`. The same walk with the map turned round is the undo: no place is
remembered, nothing is kept alive, and what was bound while torch was patched is given back too. What cannot be reached
(closures, defaults, class dictionaries) is logged by name, except functions that are cast by what they call: losses, say.
"""

from __future__ import annotations

import logging
import types
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from torch import nn

from .cpp_wrappers import is_held_by_others
from .out_of_reach import out_of_reach
from .swapping import Swap, isinstance_of, loaded_modules, swap_in_holders, swap_in_models, swap_in_modules

_logger = logging.getLogger("ampkit")

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
        _searched.update(name for name, _ in loaded_modules())
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
