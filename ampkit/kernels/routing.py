"""Who computes an operator: the compiled kernels or plain torch. `serve` decides it, call by call.

The kernels see the arguments first, and refuse what they cannot take before they have written anything (csrc/check.h): tensors
of another dtype than float32, float16 and bfloat16, of several devices, or no plain ones. Python looks only at what they refuse.
Lists over several devices, as of the gradients of one model, are parted there. Of tensors that lie on several processes
(DTensors) the part that lies here is taken, which may be empty; what is found out about it holds for this process alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, overload

import torch
from torch import Tensor

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
    torch._C._set_grad_enabled(False)
    try:
        result = _by_kernel(op, lists, rest, flags, rule)
        return _serve(op, reference, lists, rest, flags, rule) if result is NotImplemented else result
    finally:
        torch._C._set_grad_enabled(enabled)


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


def _arguments(lists: Mapping[str, Tensors], rest: tuple, flags: tuple, rule: str | None) -> tuple:
    """Of the compiled operator, in the order of its schema."""
    if rule is None:
        return (*lists.values(), *rest, *flags)
    grads, *written = lists.values()
    return (rule, grads, list(chain.from_iterable(written)), *rest)


def _by_kernel(op: str, lists: Mapping[str, Tensors], rest: tuple, flags: tuple, rule: str | None) -> Any:
    """What the kernels return if they take these arguments, which they see for themselves; else NotImplemented.

    An error is one of the work itself, as of a launch: what was to be done may be done, and is not tried again.
    """
    if not backend.kernel_devices or torch.compiler.is_compiling():
        return NotImplemented
    return backend.directly(op, *_arguments(lists, rest, flags, rule))


def _serve(
    op: str, reference: Callable, lists: Mapping[str, Tensors], rest: tuple, flags: tuple, rule: str | None
) -> Any:
    """What the kernels did not take at once. Raises before anything is written if the lists do not fit."""
    if any(is_sharded(tensor) for column in lists.values() for tensor in column):
        lists = {name: [local(tensor) for tensor in column] for name, column in lists.items()}
    first = next(filter(None, lists.values()))
    device = first[0].device
    if rule is None and any(tensor.device != device for tensor in first):
        return _on_each_device(op, reference, lists, rest, flags)
    is_alone = all(tensor.device == device for column in lists.values() for tensor in column)
    fits = is_alone and device.type in backend.kernel_devices
    fits = fits and all(tensor.dtype in _TAKEN for column in lists.values() for tensor in column)
    rest = tuple([on(one, device) for one in rest])
    here = tuple([_flag_on(device, flag, name) for flag, name in zip(flags, ("found_inf", "first_bad"))])
    if fits:
        rest = tuple([_in_float32(one) for one in rest])
        result = _by_kernel(op, lists, rest, here, rule)
    if not fits or result is NotImplemented:
        _check_lists(op if rule is None else f"multi_tensor_{rule.partition(' ')[0]}", lists)
        for flag, name, dtype in zip(flags, ("found_inf", "first_bad"), (torch.float32, torch.int64)):
            check_flag(op, name, flag, dtype)
        if fits:
            result = backend.through_dispatcher(op, *_arguments(lists, rest, here, rule))
        else:
            result = reference(*rest, *here, **lists)
    for flag, home, gather in zip(here, flags, (torch.maximum, torch.minimum)):
        if flag is not home:
            home.copy_(gather(home, flag.to(home.device).reshape(home.shape)))
    return result


def _on_each_device(
    op: str, reference: Callable, lists: Mapping[str, Tensors], rest: tuple, flags: tuple
) -> list[tuple[list[int], Any]]:
    """One call for the tensors of each device; returns their indices with the result of each."""
    indices_on: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(next(filter(None, lists.values()))):
        indices_on.setdefault(tensor.device, []).append(i)
    _check_lists(op, lists)  # before the first call writes
    results = []
    for indices in indices_on.values():
        part = {name: [column[i] for i in indices] if column else column for name, column in lists.items()}
        found_inf, first_bad = flags or (None, None)
        index = None if first_bad is None else torch.full_like(first_bad, NO_BAD)
        results.append((indices, _serve(op, reference, part, rest, (found_inf, index) if flags else (), None)))
        if first_bad is not None and index is not None:
            places = integers_on(index.device, [*indices, NO_BAD])
            first_bad.copy_(torch.minimum(first_bad, places[index.clamp(max=len(indices))]))
    return results


def _check_lists(op: str, lists: Mapping[str, Tensors]) -> None:
    """`check_lists` of those that are there: an empty one stands for one that is absent."""
    check_lists(op, **{name: column for name, column in lists.items() if column})


def _in_float32(one: Any) -> Any:
    return one.detach().to(torch.float32) if isinstance(one, Tensor) else one


def _flag_on(device: torch.device, flag: Tensor | None, name: str) -> Tensor | None:
    """A flag where the lists are, whose value is brought home afterwards."""
    if flag is None or flag.device == device:
        return flag
    return torch.full((1,), NO_BAD if name == "first_bad" else 0, dtype=flag.dtype, device=device)
