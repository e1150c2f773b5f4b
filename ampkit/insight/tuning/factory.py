"""The factory that is passed to `tune`: how other processes import it, and checks of its result."""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_BATCHES = 32  # are kept, and used in turn


def located(factory: Callable[[], Any] | str) -> tuple[str, str]:
    """Return the script or module and the name with which another process can `load` the factory."""
    if isinstance(factory, str):
        place, _, name = factory.rpartition(":")
        if not place or not name:
            expected = "'script.py:factory' or 'package.module:factory'"
            raise ValueError(f"tune: {factory!r} names no factory: expected {expected}.")
        if place.endswith(".py") and not os.path.exists(place):
            raise FileNotFoundError(f"tune: there is no {place!r} here.")
        return os.path.abspath(place) if place.endswith(".py") else place, name
    refuse_no_factory(factory, "it")
    name, place = getattr(factory, "__qualname__", str(factory)), factory.__module__
    spec = getattr(sys.modules.get(place), "__spec__", None)  # None for a script
    if spec is not None:
        place = spec.name  # also for ``python -m package.module``
    elif place == "__main__":
        place = os.path.abspath(getattr(sys.modules["__main__"], "__file__", None) or "")
    if "<" in name or (spec is None and not os.path.isfile(place)):
        raise ValueError(
            f"tune runs the factory in processes of its own, and {name} cannot be imported. "
            "Write it to a file, as a function at the top level, and pass that function or 'file.py:function'."
        )
    return place, name


def load(place: str, name: str) -> Callable[[], Any]:
    if os.path.isabs(place):
        sys.path.insert(0, os.path.dirname(place))
        loader = importlib.machinery.SourceFileLoader("_tuned", place)  # scripts may have any extension
        spec: Any = importlib.util.spec_from_loader("_tuned", loader)
        module = sys.modules["_tuned"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    try:
        factory: Callable[[], Any] = functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        raise NoFactory(f"{os.path.basename(place)} has no {name!r}. {_EXPECTED}") from None
    refuse_no_factory(factory, f"{name!r} of {os.path.basename(place)}")
    return factory


class NoFactory(TypeError):
    """An error for an argument of `tune` that is no factory."""


_EXPECTED = "tune expects a factory, a function without arguments: def factory(): ...; return model, optimizer, batches, loss_fn"


def refuse_no_factory(found: Any, name: str) -> None:
    """Raise `NoFactory` for an object that cannot be called, and for a model."""
    kind = type(found).__name__
    if isinstance(found, nn.Module) or not callable(found):
        raise NoFactory(f"{name} is {'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}. {_EXPECTED}")


def checked(made: Any) -> tuple[nn.Module, Any, list[Any], Callable[..., Tensor]]:
    """Return (model, optimizer, first batches, loss_fn) from the result of a factory. Raises TypeError for other results."""
    kinds = [type(x).__name__ for x in made] if isinstance(made, tuple) else type(made).__name__
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
