"""The library in C++, ampkit._casting, and its wrappers: `wrappers.wrap` puts them around wrappers in Python.

The library reads torch's own structures, so it serves the torch it was built with and no other; libraries.py tells how
AMPKIT_EXTENSION decides. See "Wrappers twice" in NOTES.md. A process makes a ``Call`` of the library for a name of torch once, and
lends it to one engine after the other, since dynamo cannot forget what it learned about a function.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, ModuleType, WrapperDescriptorType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..libraries import load_library
from ..patching import Undo
from ..policy.cast_rules import CastKind


def _import() -> Any:
    library = importlib.import_module("ampkit._casting")
    if not hasattr(getattr(library, "Switch", None), "set"):
        raise ImportError("it was built from older sources; build it again")
    return library


#: The library, or None; and why, in words.
library, why = load_library("ampkit._casting", _import)
if library is not None:
    why = f"built with torch {library.torch_version}"


def wrap_in_cpp(
    control: Any,
    undo: Undo,
    wrapper: Callable,
    original: Callable,
    owner: Any,
    name: str,
    kind: CastKind,
    target: torch.dtype,
    store: Any = None,
    cast_weight: Callable[[Tensor], Tensor] | None = None,
) -> Callable | None:
    """Return the function that calls ``wrapper`` for what C++ does not handle, to the `undo`; None where C++ has no shape for it.

    Casts of weights are looked up in ``store``, and left to ``cast_weight`` where it has none.
    """
    known = id(owner), name, type(original)
    if known not in _places:
        _places[known] = _make_place(owner, name, original)
    if (place := _places[known]) is None:
        return None
    place.call.bind(kind.name, original, control, wrapper, target, store, cast_weight)
    _traced[place.key] = wrapper
    undo.callback(_unbind, place, original)
    function: Callable = place.function
    return function


def _unbind(place: _Place, original: Callable) -> None:
    """Make a wrapper call torch's function from now on, wherever a script has kept it."""
    place.call.unbind()
    _traced[place.key] = original


def remind_dynamo() -> None:
    """Let dynamo list torch's functions, and ampkit's that last, while torch is not patched.

    dynamo makes its table at the first use, and again after torch.distributed has started or ended. A table made
    while torch is patched would lack the originals.
    """
    if "torch._dynamo" not in sys.modules:
        return
    from torch._dynamo.trace_rules import get_torch_obj_rule_map
    from torch._dynamo.variables import PolyfilledFunctionVariable

    originals = {torch.mm, torch.layer_norm}  # torch has the first under another name too
    if get_torch_obj_rule_map.cache_info().currsize and not originals <= get_torch_obj_rule_map().keys():
        get_torch_obj_rule_map.cache_clear()
    rules, handlers = get_torch_obj_rule_map(), PolyfilledFunctionVariable._get_polyfill_handlers()
    for place in _places.values():
        if place is not None and place.function in handlers:
            rules.setdefault(place.function, PolyfilledFunctionVariable)


class _Place(NamedTuple):
    call: Any
    function: Callable
    key: str


# The functions that dynamo traces in place of built-in ones. It needs a global to know where a function comes from.
_traced: dict[str, Callable] = {}

_places: dict[tuple[int, str, type], _Place | None] = {}


def _make_place(owner: Any, name: str, original: Callable) -> _Place | None:
    is_method = owner is Tensor and isinstance(original, (MethodDescriptorType, WrapperDescriptorType))
    is_function = isinstance(owner, ModuleType) and isinstance(original, BuiltinFunctionType)
    if not (is_method or is_function or isinstance(original, FunctionType)):
        return None
    module = owner.__name__ if isinstance(owner, ModuleType) else "torch"
    signature, doc = getattr(original, "__text_signature__", None), original.__doc__
    doc = doc if signature is None else f"{name}{signature}\n--\n\n{doc or ''}"
    call = library.Call(name, module, doc, original)
    function = call.method(Tensor) if is_method else call.function()
    if function is None:
        return None
    key = f"torch.Tensor.{name}" if owner is Tensor else f"{module}.{name}"
    if is_function:

        def traced(*args: Any, **kwargs: Any) -> Any:
            return _traced[key](*args, **kwargs)

        torch.compiler.substitute_in_graph(function, skip_signature_check=True)(traced)
    return _Place(call, function, key)
