"""`operator` makes a multi-tensor operator of a function in plain torch: its calls go to the compiled kernels or to it.

The function is the specification: signature, docstring and meaning stand there and nowhere else. The annotations of its
parameters say what becomes of them when lists lie on several devices, or hold what the kernels do not take:

- ``Tensors``: a list; the lists of a call have one length, and are parted alike.
- ``PerTensor``: a vector with one element for each tensor of the lists, parted like them.
- ``Number``: a Python number, or a tensor of one element, which is brought to the device of the lists and read there.
- ``Tensor``: a tensor, likewise.
- ``Flag``: a tensor of one element that is written there, and brought home. ``found_inf`` becomes 1.0 where something is not
  finite and is never cleared; ``first_bad``, filled with NO_BAD before, gets the smallest index of such a tensor.

Anything else is handed on as it is. Of tensors that lie on several processes (DTensors) the part that lies here is taken, which
may be empty; what is found out about it holds for this process alone.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from ampkit.dtypes import CASTABLE
from ampkit.kernels import backend
from ampkit.kernels.checks import check_flag, check_lists
from ampkit.kernels.signatures import with_signature_of
from ampkit.sharding import is_sharded, local

Function = TypeVar("Function", bound=Callable)
Tensors = Sequence[Tensor]
PerTensor = Tensor
Number = float | Tensor
Flag = Tensor

#: What ``first_bad`` holds while no tensor was found that is not finite: above every index.
NO_BAD = 2**62

#: What the kernels take: moments may be packed (moments.py), and there are rests (split.py), which other lists they refuse.
_TAKEN = CASTABLE | {torch.uint8, torch.int16}

_FLAG_DTYPES = {"found_inf": torch.float32, "first_bad": torch.int64}


def operator(
    function: Function | None = None, *, before: Callable | None = None, after: Callable | None = None
) -> Function:
    """The operator that ``function`` defines, itself ``operator.__wrapped__``; autograd does not see what it does.

    ``before(given)`` is called first, with all arguments by name, and may change them; it may return what undoes what it has
    written, for a call that is refused. Where the kernels do not serve a call at
    once, ``after(given, results)`` makes what the operator returns of what it returned for each group of tensors: (indices or
    None, result).
    """
    if function is None:
        return functools.partial(operator, before=before, after=after)
    plan = _Plan(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # What torch.no_grad() does, without a context object for every call.
        enabled, undo = torch.is_grad_enabled(), None
        torch._C._set_grad_enabled(False)
        try:
            if before is not None:
                args, kwargs = (), plan.bind(*args, **kwargs)
                undo = before(kwargs)
            result = _served_at_once(plan.direct, args, kwargs)
            if result is not NotImplemented:
                return result
            given = plan.bind(*args, **kwargs)
            results = _serve(plan, given)
            return None if after is None else after(given, results)
        except RuntimeError:
            if undo is not None:
                undo()
            raise
        finally:
            torch._C._set_grad_enabled(enabled)

    return call


def _served_at_once(direct: Callable | None, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What the kernels return where these arguments are as they take them, which they see for themselves; else NotImplemented.

    An error is one of the work itself, as of a launch: what was to be done may be done, and is not tried again.
    """
    if direct is None or not backend.kernel_devices or torch.compiler.is_compiling():
        return NotImplemented
    return direct(*args, **kwargs)


def _singles_lie_on(device: torch.device, plan: _Plan, given: dict[str, Any]) -> bool:
    """Whether nothing but the lists has to be brought to ``device``."""
    for name in plan.singles:
        one = given[name]
        if isinstance(one, Tensor) and one.device != device:
            return False
    return True


def operator_without_lists(function: Function) -> Function:
    """The same for a function that writes to its first argument, and is computed where that is."""
    kernel, direct = backend.kernel_of(function), backend.direct_kernel_of(function)

    @functools.wraps(function)
    def call(first: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if _served_at_once(direct, (first, *args), kwargs) is not NotImplemented:
            return first
        if first.device.type in backend.kernel_devices:
            kernel(first, *args, **kwargs)
        else:
            with torch.no_grad():
                function(first, *args, **kwargs)
        return first

    return call


class _Plan:
    """What is known of an operator before it is called."""

    def __init__(self, function: Callable) -> None:
        kinds: dict[str, list[str]] = {}
        for name, annotation in function.__annotations__.items():
            if name != "return":
                kinds.setdefault(annotation.removesuffix(" | None"), []).append(name)
        self.name = function.__name__
        names = inspect.signature(function).parameters
        self.bind = with_signature_of(function, f"dict({', '.join(f'{name}={name}' for name in names)})", {})
        self.reference = function
        self.kernel, self.direct = backend.kernel_of(function), backend.direct_kernel_of(function)
        self.lists = kinds.get("Tensors", [])
        self.vectors = kinds.get("PerTensor", [])
        self.read = [*kinds.get("Number", []), *kinds.get("Tensor", [])]
        self.flags = kinds.get("Flag", [])
        self.singles = [*self.read, *self.flags, *self.vectors]


@overload
def on(number: Tensor, device: torch.device) -> Tensor: ...
@overload
def on(number: float, device: torch.device) -> float: ...
@overload
def on(number: None, device: torch.device) -> None: ...
def on(number: Number | None, device: torch.device) -> Number | None:
    """A number where it is needed, without waiting for a GPU's work, unless it is pinned: it may be written to meanwhile."""
    if not isinstance(number, Tensor) or number.device == device:
        return number
    return number.to(device, non_blocking=device.type == "cuda" and not number.is_pinned())


def integers_on(device: torch.device, numbers: Sequence[int]) -> Tensor:
    """``torch.tensor(numbers, device=device)``, made there, run by run of consecutive numbers.

    A copy from the host would wait, and a CUDA graph that is being captured could not hold it.
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([number, number + 1])
    return torch.cat([torch.arange(first, end, device=device) for first, end in runs or [[0, 0]]])


def _serve(plan: _Plan, given: dict[str, Any]) -> list[tuple[list[int] | None, Any]]:
    """One call if that can serve everything, otherwise one for each device and, on a device with kernels, apart for the
    tensors that these cannot take. Raises before anything is written if the lists do not fit.
    """
    columns = [given[name] for name in plan.lists]
    first = columns[0]
    for column in columns:
        if not first or (column is not None and len(column) != len(first)):
            _check_flags(plan, given)
            check_lists(plan.name, **dict(zip(plan.lists, columns)))
            return []
    if any(is_sharded(tensor) for column in columns for tensor in column or () if tensor is not None):
        return _serve(plan, _local(plan, given))
    _check_flags(plan, given)
    _refuse_some_without_data(plan, given)
    return [
        (indices, _compute(plan, given, compute, device, indices)) for compute, device, indices in _groups(plan, given)
    ]


def _check_flags(plan: _Plan, given: dict[str, Any]) -> None:
    for name in plan.flags:
        check_flag(plan.name, name, given[name], _FLAG_DTYPES[name])


def _refuse_some_without_data(plan: _Plan, given: dict[str, Any]) -> None:
    """Raise where some tensors are on the meta device and others are not: what is computed of them or found in them is lost."""
    named = [(f"{name}[{i}]", tensor) for name in plan.lists for i, tensor in enumerate(given[name] or ())]
    named += [(name, given[name]) for name in plan.flags if given[name] is not None]
    without = [name for name, tensor in named if tensor is not None and tensor.device.type == "meta"]
    if without and len(without) < len(named):
        raise RuntimeError(f"{plan.name}: {without[0]} is on the meta device, without data, and others are not")


def _local(plan: _Plan, given: dict[str, Any]) -> dict[str, Any]:
    """The same call for the parts of its tensors that lie on this process."""
    here = dict(given)
    for name in plan.lists:
        column = given[name]
        if column is not None:
            here[name] = [None if tensor is None else local(tensor) for tensor in column]
    return here


def _groups(plan: _Plan, given: dict[str, Any]) -> list[tuple[Callable, torch.device, list[int] | None]]:
    """Who computes what: the indices of its tensors in the lists, None if they are all of them."""
    lists = {name: given[name] for name in plan.lists if given[name] is not None}
    device = given[plan.lists[0]][0].device
    if all({tensor.device for tensor in column} == {device} for column in lists.values()):
        if device.type not in backend.kernel_devices:
            return [(plan.reference, device, None)]
        if all({tensor.dtype for tensor in column} <= _TAKEN for column in lists.values()):
            return [(plan.kernel, device, None)]
    # Groups of one call must not be half done when a later one turns out to be wrong.
    check_lists(plan.name, **lists)
    groups: dict[tuple, list[int]] = {}
    for i, row in enumerate(zip(*lists.values())):
        device = row[0].device
        fits = all(tensor.device == device and tensor.dtype in _TAKEN for tensor in row)
        compute = plan.kernel if fits and device.type in backend.kernel_devices else plan.reference
        groups.setdefault((compute, device), []).append(i)
    return [(compute, device, indices) for (compute, device), indices in groups.items()]


def _compute(
    plan: _Plan, given: dict[str, Any], compute: Callable, device: torch.device, indices: list[int] | None
) -> Any:
    if indices is None and _singles_lie_on(device, plan, given):
        return compute(**given)
    here = dict(given)
    for name in plan.read:
        here[name] = on(given[name], device)
    for name in plan.flags:
        flag = given[name]
        if flag is not None and (flag.device != device or (indices is not None and name == "first_bad")):
            here[name] = torch.full((1,), NO_BAD if name == "first_bad" else 0, dtype=flag.dtype, device=device)
    for name in plan.vectors:
        if (vector := given[name]) is not None:
            chosen = vector if indices is None else vector[integers_on(vector.device, indices)]
            here[name] = chosen.to(device)
    if indices is not None:
        for name in plan.lists:
            here[name] = None if given[name] is None else [given[name][i] for i in indices]
    results = compute(**here)
    for name in plan.flags:
        if here[name] is not given[name]:
            _bring_home(name, here[name], given[name], indices)
    return results


def _bring_home(name: str, flag: Tensor, home: Tensor, indices: list[int] | None) -> None:
    if name == "found_inf":
        home.copy_(torch.maximum(home, flag.to(home.device).reshape(home.shape)))
        return
    if indices is not None:
        flag = integers_on(flag.device, [*indices, NO_BAD])[flag.clamp(max=len(indices))]
    home.copy_(torch.minimum(home, flag.to(home.device).reshape(home.shape)))
