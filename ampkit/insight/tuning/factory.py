"""The factory that `tune` is given: where other processes find it, and what it must return."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_BATCHES = 32  # are kept, and taken in turn


@dataclass(frozen=True)
class Source:
    """A function ``name`` in a module or in a file, whose path ends with .py."""

    place: str
    name: str

    @classmethod
    def of(cls, factory: Callable[[], Any] | str) -> Source:
        """Raises as `tune` does."""
        main = sys.modules["__main__"]
        file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
        if isinstance(factory, str):
            place, _, name = factory.rpartition(":")
            if not place or not name:
                expected = "'script.py:factory' or 'package.module:factory'"
                raise ValueError(f"tune: {factory!r} names no factory: expected {expected}.")
            if place.endswith(".py") and not os.path.exists(place):
                raise FileNotFoundError(f"tune: there is no {place!r} here.")
        else:
            refuse_no_factory(factory, "it")
            place, name = getattr(factory, "__module__", "__main__"), getattr(factory, "__qualname__", "<object>")
            if "<" in name or (place == "__main__" and file is None):
                raise ValueError(
                    f"tune runs the factory in processes of its own, which have to import it, and {name} cannot be imported. "
                    "Write it to a file, as a function at the top level, and pass that function or 'file.py:function'."
                )
            if place == "__main__":
                place = file if spec is None or spec.loader is None else spec.name  # python script.py, or python -m
        return cls(os.path.abspath(place) if place.endswith(".py") else place, name)

    def load(self) -> Callable[[], Any]:
        """Import it, in another process."""
        if self.place.endswith(".py"):
            sys.path.insert(0, os.path.dirname(self.place))
            spec: Any = importlib.util.spec_from_file_location("_tuned", self.place)
            module = sys.modules["_tuned"] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(self.place)
        try:
            factory: Callable[[], Any] = functools.reduce(getattr, self.name.split("."), module)
        except AttributeError:
            raise NoFactory(f"{os.path.basename(self.place)} has no {self.name!r}. {_EXPECTED}") from None
        refuse_no_factory(factory, f"{self.name!r} of {os.path.basename(self.place)}")
        return factory


class NoFactory(TypeError):
    """What `tune` was given is something else."""


_EXPECTED = "tune expects a factory, a function without arguments: def factory(): ...; return model, optimizer, batches, loss_fn"


def refuse_no_factory(found: Any, name: str) -> None:
    """Raise `NoFactory` for what cannot be called without arguments, and for a model."""
    kind = type(found).__name__
    if isinstance(found, nn.Module) or not callable(found):
        raise NoFactory(f"{name} is {'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}. {_EXPECTED}")
    with contextlib.suppress(ValueError):  # no signature, as some of C
        params = inspect.signature(found).parameters.values()
        needed = [
            one.name
            for one in params
            if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        ]
        if needed:
            raise NoFactory(f"{name} needs the arguments {', '.join(needed)}. {_EXPECTED}")


def checked(made: Any) -> tuple[nn.Module, Any, list[Any], Callable[..., Tensor]]:
    """(model, optimizer, first batches, loss_fn) of what a factory returned. Raises TypeError where it is something else."""
    kinds = [type(one).__name__ for one in made] if isinstance(made, tuple) else type(made).__name__
    if not (isinstance(made, tuple) and len(made) == 4 and isinstance(made[0], nn.Module) and callable(made[3])):
        raise TypeError(f"the factory returned {kinds}; expected (model, optimizer, batches, loss_fn).")
    model, optimizer, batches, loss_fn = made
    if lower := {param.dtype for param in model.parameters() if param.is_floating_point()} - {torch.float32}:
        raise TypeError(
            f"the factory's model has weights in {lower.pop()}; expected float32, which all is compared with."
        )
    kept = list(itertools.islice(batches, _BATCHES))
    if not kept or any(not isinstance(batch, (tuple, list)) or len(batch) != 2 for batch in kept):
        raise TypeError(f"the factory's batches are {kept and type(kept[0])}; expected pairs, (inputs, targets).")
    return model, optimizer, kept, loss_fn
