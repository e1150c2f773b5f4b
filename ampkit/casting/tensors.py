"""Finding and casting the tensors in a model's arguments (`map_tensors`) and in an optimizer (`params_of`, `states_to_cast`)."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from operator import is_
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..dtypes import CASTABLE, LOWER_PRECISION

T = TypeVar("T")

# The methods are faster than ``to``, and keep the memory format as it does.
CONVERT: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float32: Tensor.float,
    torch.float16: Tensor.half,
    torch.bfloat16: Tensor.bfloat16,
}

_traced = torch.compiler.is_dynamo_compiling

LEAVES = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.Size, torch.nn.Module, type)


def map_tensors(value: T, fn: Callable[[Tensor], Any], _inside: tuple[int, ...] = ()) -> T:
    """Return ``value`` with ``fn`` applied to every tensor in it; the very same object when ``fn`` changed none of them.

    Containers keep their types: lists, tuples, named tuples, sets, deques, mappings of every kind, dataclasses, and
    batch classes of the user's own (anything with a callable ``.to`` and a ``__dict__``). They are copied, never
    edited. Strings, arrays, generators and modules stay as they are.
    """
    if isinstance(value, Tensor):
        return fn(value)
    if _traced():
        return _map_in_trace(value, fn)
    if isinstance(value, LEAVES) or id(value) in _inside:
        return value
    rebuild = _rebuilder(value)
    if rebuild is None:
        return value
    inside = (*_inside, id(value))
    return rebuild(value, lambda item: map_tensors(item, fn, inside))


def to_float32(x: Tensor) -> Tensor:
    """Cast ``x`` to float32 if it is in lower precision."""
    return x.float() if x.dtype in LOWER_PRECISION else x


def cast_floating(value: T, dtype: torch.dtype) -> T:
    """Cast the float32, float16 and bfloat16 tensors in ``value`` to ``dtype``; all other tensors stay unchanged."""
    return map_tensors(value, lambda x: x.to(dtype) if x.dtype in CASTABLE else x)


def cast_state(state: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Cast an optimizer's state of one parameter to ``dtype``, without "step", which torch does not cast either when it loads."""
    return {key: cast_floating(value, dtype) for key, value in state.items() if key != "step"}


def params_of(optimizer: Any) -> list[Tensor]:
    """The parameters of an optimizer's groups, in their order."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def states_to_cast(optimizer: Any) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Yield (parameter, its state) where the optimizer has some; nothing where it keeps its state in lower precision."""
    if not getattr(optimizer, "keeps_narrow_state", False):
        for param in params_of(optimizer):
            if param in optimizer.state:
                yield param, optimizer.state[param]


def tensors_in(*values: Any) -> Iterator[Tensor]:
    """Return every tensor that `map_tensors` would visit."""
    tensors: list[Tensor] = []

    def visit(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    for value in values:
        map_tensors(value, visit)
    return iter(tensors)


def _rebuilder(value: Any) -> Callable[[Any, Callable], Any] | None:
    """The function that maps over the items of ``value``, or None when it is no container."""
    if isinstance(value, (tuple, set, frozenset)):
        return _map_fixed
    if isinstance(value, (list, deque)):
        return _map_list
    if isinstance(value, Mapping):
        return _map_mapping  # before dataclasses: Hugging Face's ModelOutput is both
    if dataclasses.is_dataclass(value) or (callable(getattr(value, "to", None)) and hasattr(value, "__dict__")):
        return _map_attributes
    return None


def _map_in_trace(value: Any, fn: Callable) -> Any:
    """Do what `map_tensors` does, in terms that dynamo understands. Every container is a new one."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, LEAVES):
        return value
    if isinstance(value, tuple):
        items = [_map_in_trace(item, fn) for item in value]
        return type(value)(*items) if hasattr(value, "_make") else tuple(items)
    if isinstance(value, list):
        return [_map_in_trace(item, fn) for item in value]
    if isinstance(value, dict):
        mapped = {key: _map_in_trace(item, fn) for key, item in value.items()}
        if type(value) is dict:
            return mapped
        return type(value)(**mapped) if dataclasses.is_dataclass(value) else type(value)(mapped)
    if dataclasses.is_dataclass(value):
        items = {name: _map_in_trace(getattr(value, name), fn) for name in value.__dataclass_fields__}
        return type(value)(**items)
    rebuild = _rebuilder(value)
    return value if rebuild is None else rebuild(value, lambda item: _map_in_trace(item, fn))


def _map_fixed(value: Any, fn: Callable) -> Any:
    items = list(map(fn, value))
    if all(map(is_, items, value)):
        return value
    # A named tuple (PackedSequence is one) takes its fields one by one; ``_make`` takes them together.
    return value._make(items) if hasattr(value, "_make") else type(value)(items)


def _map_list(value: Any, fn: Callable) -> Any:
    items = list(map(fn, value))
    if all(map(is_, items, value)):
        return value
    mapped = copy.copy(value)  # keeps the attributes of a subclass, and a deque's maxlen
    mapped.clear()
    mapped.extend(items)
    return mapped


def _map_mapping(value: Mapping, fn: Callable) -> Mapping:
    changed = {key: new for key, old in value.items() if (new := fn(old)) is not old}
    if not changed:
        return value
    if not isinstance(value, MutableMapping):
        return type(value)({**value, **changed})
    mapped = copy.copy(value)
    for key, item in changed.items():
        mapped[key] = item
    return mapped


def _map_attributes(value: Any, fn: Callable) -> Any:
    # The copy is walked, not the original: a class with its own __copy__ may have renewed its parts already.
    mapped = copy.copy(value)
    names = vars(mapped) if hasattr(mapped, "__dict__") else [field.name for field in dataclasses.fields(mapped)]
    items = [(name, getattr(mapped, name, None)) for name in names]
    changed = {name: new for name, old in items if (new := fn(old)) is not old}
    for name, item in changed.items():
        object.__setattr__(mapped, name, item)  # a frozen dataclass refuses the plain way
    return mapped if changed else value
