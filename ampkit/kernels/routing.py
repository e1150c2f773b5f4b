"""Who computes an operator: the compiled kernels or plain torch. `serve` decides it, call by call.

The kernels see the arguments first, and refuse what they cannot take before they have written anything (csrc/check.h): tensors
of another dtype than float32, float16 and bfloat16, of several devices, or no plain ones. Python looks only at what they refuse.
Lists over several devices, as of the gradients of one model, are parted there. Of tensors that lie on several processes
(DTensors) the part that lies here is taken, which may be empty; what is found out about it holds for this process alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, overload

import torch
from torch import Tensor
from torch._C import _set_grad_enabled
from torch.compiler import is_compiling

from ampkit.dtypes import CASTABLE
from ampkit.kernels import backend
from ampkit.kernels.checks import check_flag, check_lists
from ampkit.sharding import is_sharded, local

Tensors = Sequence[Tensor]
Number = float | Tensor

#: What ``first_bad`` holds while no tensor was found that is not finite: above every index.
NO_BAD = 2**62

#: What the kernels take: moments may be packed (moments.py), and there are rests (split.py), which other lists they refuse.
_TAKEN = CASTABLE | {torch.uint8, torch.int16}


def serve(
    op: str,
    reference: Callable[..., Any],
    lists: Mapping[str, Tensors],
    rest: tuple[Any, ...] = (),
    flags: tuple[Tensor | None, ...] = (),
    rule: str | None = None,
) -> Any:
    """``reference(*rest, *flags, **lists)``, by a kernel where one takes that; autograd does not see what it does.

    ``op`` names the compiled operator, which is given the lists, then ``rest`` and ``flags``; with a ``rule`` it is the step of
    that rule. Lists that are not empty have one length. A tensor in ``rest`` is read beside the lists. ``flags`` are ``found_inf``,
    which becomes 1.0 where something is not finite and is never cleared, and ``first_bad``, filled with NO_BAD before, which gets
    the smallest index of such a tensor.
    """
    # What torch.no_grad() does, without a context object for every call.
    enabled = torch.is_grad_enabled()
    _set_grad_enabled(False)
    try:
        # An error is one of the work itself, as of a launch: what was to be done may be done, and is not tried again.
        result: Any = NotImplemented
        kernel = backend.direct.get(op)
        if kernel is not None and backend.kernel_devices and not is_compiling():
            if rule is None:
                result = kernel(*lists.values(), *rest, *flags)
            else:
                grads, *written = lists.values()
                result = kernel(rule, grads, written, *rest)
        return _serve(op, reference, lists, rest, flags, rule) if result is NotImplemented else result
    except RuntimeError as error:
        _raise_as_torch_does(error, lists)
        raise
    finally:
        _set_grad_enabled(enabled)


def _raise_as_torch_does(error: RuntimeError, lists: Mapping[str, Tensors]) -> None:
    """Where the kernels could not allocate (csrc/check.h), ask torch for as many bytes: its error has a type and says more."""
    if found := re.search(r"ampkit: out of memory: (\d+) bytes", str(error)):
        device = next(tensor.device for column in lists.values() for tensor in column)
        torch.empty(int(found[1]), dtype=torch.uint8, device=device)


def number(value: Number | None) -> tuple[float, Tensor | None]:
    """A number, 1 where it is None, as the compiled operators take it: as a float, or as a tensor that is read instead."""
    if isinstance(value, Tensor):
        return 1.0, value if value.is_floating_point() else value.to(torch.float32)
    return 1.0 if value is None else float(value), None


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


def _serve(
    op: str, reference: Callable, lists: Mapping[str, Tensors], rest: tuple, flags: tuple, rule: str | None
) -> Any:
    """What the kernels did not take at once. Raises before anything is written if the lists do not fit."""
    if any(is_sharded(tensor) for column in lists.values() for tensor in column):
        here = {name: [local(tensor) for tensor in column] for name, column in lists.items()}
        return serve(op, reference, here, rest, flags, rule)
    devices = [tensor.device for column in lists.values() for tensor in column]
    device = devices[0]
    is_alone = all([other == device for other in devices])
    # An empty list stands for one that is absent.
    check_lists(
        op if rule is None else f"multi_tensor_{rule.partition(' ')[0]}",
        **{name: column for name, column in lists.items() if column},
    )
    for flag, name, dtype in zip(flags, ("found_inf", "first_bad"), (torch.float32, torch.int64)):
        check_flag(op, name, flag, dtype)
    _refuse_some_without_data(op, lists, flags)
    if not is_alone and rule is None and (parts := _by_device(lists)) is not None:
        return [(indices, _serve_part(op, reference, part, indices, rest, flags)) for indices, part in parts]
    rest = tuple([on(one, device) for one in rest])
    found = tuple([_flag_on(device, flag) for flag in flags])
    fits = is_alone and device.type in backend.kernel_devices
    if not fits or any([tensor.dtype not in _TAKEN for column in lists.values() for tensor in column]):
        result = reference(*rest, *found, **lists)
    else:
        rest = tuple([one.detach().to(torch.float32) if isinstance(one, Tensor) else one for one in rest])
        columns = tuple(lists.values())
        given = columns if rule is None else (rule, columns[0], list(chain.from_iterable(columns[1:])))
        result = backend.through_dispatcher(op, *given, *rest, *found)
    for flag, home, gather in zip(found, flags, (torch.maximum, torch.minimum)):
        if flag is not home:
            home.copy_(gather(home, flag.to(home.device).reshape(home.shape)))
    return result


def _refuse_some_without_data(op: str, lists: Mapping[str, Tensors], flags: tuple) -> None:
    """Raise where some tensors are on the meta device and others are not: what is computed of them or found in them is lost."""
    named = [(f"{name}[{i}]", tensor) for name, column in lists.items() for i, tensor in enumerate(column)]
    named += [(name, flag) for name, flag in zip(("found_inf", "first_bad"), flags) if flag is not None]
    without = [name for name, tensor in named if tensor.device.type == "meta"]
    if without and len(without) < len(named):
        raise RuntimeError(f"{op}: {without[0]} is on the meta device, without data, and others are not")


def _flag_on(device: torch.device, flag: Tensor | None) -> Tensor | None:
    """A flag where the lists are, whose value is brought home afterwards."""
    if flag is None or flag.device == device:
        return flag
    return torch.full((1,), 0 if flag.is_floating_point() else NO_BAD, dtype=flag.dtype, device=device)


def _by_device(lists: Mapping[str, Tensors]) -> list[tuple[list[int], dict[str, Tensors]]] | None:
    """The lists of each device, with their places among all; None where the first list lies on one."""
    places: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(next(filter(None, lists.values()))):
        places.setdefault(tensor.device, []).append(i)
    if len(places) == 1:
        return None
    return [
        (indices, {name: [column[i] for i in indices] if column else () for name, column in lists.items()})
        for indices in places.values()
    ]


def _serve_part(
    op: str, reference: Callable, lists: Mapping[str, Tensors], indices: list[int], rest: tuple, flags: tuple
) -> Any:
    """`serve` for one of several devices; in ``first_bad`` a tensor counts by its place among all."""
    found_inf, first_bad = flags or (None, None)
    index = None if first_bad is None else torch.full_like(first_bad, NO_BAD)
    result = serve(op, reference, lists, rest, (found_inf, index) if flags else ())
    if first_bad is not None and index is not None:
        places = integers_on(index.device, [*indices, NO_BAD])
        first_bad.copy_(torch.minimum(first_bad, places[index.clamp(max=len(indices))]))
    return result
