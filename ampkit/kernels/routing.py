"""The choice between a compiled kernel and plain torch for a call of an operator. `serve` makes it, call by call, by one rule.

A kernel takes plain tensors of one device, in float32, float16 and bfloat16, whose elements lie in one order. It sees the arguments
first, and refuses all others before it has written anything (csrc/check.h). Python looks only at what a kernel refuses: it words
what is wrong, takes the part of DTensors that lies on this process, and copies tensors that lie in another order. Lists of several
devices, and lists with float64 or complex tensors, are computed in plain torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _set_grad_enabled
from torch.compiler import is_compiling

from ampkit.dtypes import CASTABLE
from ampkit.kernels import backend
from ampkit.kernels.checks import check_lists, is_written
from ampkit.sharding import is_sharded, local

Tensors = Sequence[Tensor]
Number = float | Tensor
N = TypeVar("N")

#: The value of ``first_bad`` while all tensors are finite: above every index.
NO_BAD = 2**62

#: Moments may be packed (uint8: moments.py), and rests are int16 (split.py); kernels refuse both in other lists.
_TAKEN = CASTABLE | {torch.uint8, torch.int16}


def serve(
    op: str,
    reference: Callable[..., Any],
    lists: Mapping[str, Tensors | None],
    rest: tuple[Any, ...] = (),
    flags: tuple[Tensor | None, ...] = (),
    rule: str | None = None,
) -> Any:
    """Compute ``reference(*rest, *flags, **lists)``, by a kernel where one takes the arguments; autograd does not see it.

    ``op`` names the compiled operator, which is given the lists (None for one that it does without), then ``rest`` and ``flags``;
    with a ``rule`` it is the step of that rule. A tensor in ``rest`` is read beside the lists. ``flags`` are ``found_inf``, which
    becomes 1.0 where something is not finite and is never cleared, and ``first_bad``, filled with NO_BAD before, which gets the
    smallest index of such a tensor. Returns None if the lists are empty. Raises RuntimeError, with nothing written, if they do
    not fit.
    """
    columns: list[Tensors] = []
    lengths = set()
    for column in lists.values():
        columns.append(() if column is None else column)
        if column is not None:
            lengths.add(len(column))
    if lengths == {0}:
        return None
    # What torch.no_grad() does, without a context object for every call.
    enabled = torch.is_grad_enabled()
    try:
        _set_grad_enabled(False)
        kernel = backend.direct.get(op)
        if kernel is not None and len(lengths) == 1 and backend.kernel_devices and not is_compiling():
            # An error is one of the work itself, as of a launch: the work may be done, and is not tried again.
            if rule is None:
                result = kernel(*columns, *rest, *flags)
            else:
                grads, *written = columns
                result = kernel(rule, grads, written, *rest)
            if result is not NotImplemented:
                return result
        return _serve_refused(op, reference, lists, rest, flags, rule)
    except RuntimeError as error:
        _raise_as_torch_does(error, columns)
        raise
    finally:
        _set_grad_enabled(enabled)


def _raise_as_torch_does(error: RuntimeError, columns: Sequence[Tensors]) -> None:
    """Ask torch for as many bytes as a kernel could not allocate (csrc/check.h): torch's error has a type and says more."""
    if match := re.search(r"ampkit: out of memory: (\d+) bytes", str(error)):
        device = next(tensor.device for column in columns for tensor in column)
        torch.empty(int(match[1]), dtype=torch.uint8, device=device)


def number(value: Number | None) -> tuple[float, Tensor | None]:
    """A number, 1 where it is None, as the compiled operators take it: as a float, or as a tensor that is read instead."""
    if isinstance(value, Tensor):
        return 1.0, value if value.is_floating_point() else value.to(torch.float32)
    return 1.0 if value is None else float(value), None


def moved_to(number: N, device: torch.device) -> N:
    """Move a number to a device. To a GPU, waits only for a copy from pinned memory, which may be written to meanwhile."""
    if not isinstance(number, Tensor) or number.device == device:
        return number
    return number.to(device, non_blocking=device.type == "cuda" and not number.is_pinned())


def _serve_refused(
    op: str, reference: Callable, lists: Mapping[str, Tensors | None], rest: tuple, flags: tuple, rule: str | None
) -> Any:
    """Serve arguments that a kernel has not taken at once."""
    present = {name: column for name, column in lists.items() if column is not None}
    tensors = list(chain.from_iterable(present.values()))
    if any(map(is_sharded, tensors)):
        here = {name: column and [local(tensor) for tensor in column] for name, column in lists.items()}
        return serve(op, reference, here, rest, flags, rule)
    name = op if rule is None else f"multi_tensor_{rule.partition(' ')[0]}"
    check_lists(name, present, dict(zip(("found_inf", "first_bad"), flags)))
    device = tensors[0].device
    rest = tuple([moved_to(x, device) for x in rest])
    one_device = all([tensor.device == device for tensor in (*tensors, *flags) if tensor is not None])
    # LAMB's kernel computes directions twice, from moments that must not be rounded in between.
    moments = (*present["exp_avgs"], *present["exp_avg_sqs"]) if rule == "lamb" else ()
    fits = all([t.dtype in _TAKEN for t in tensors]) and all([m.dtype is torch.float32 for m in moments])
    if not (one_device and device.type in backend.kernel_devices and fits):
        return reference(*rest, *flags, **lists)
    # Tensors with gaps or in another order: the kernel computes contiguous copies, from which what it has written is copied back.
    columns = {key: [tensor.contiguous() for tensor in column or ()] for key, column in lists.items()}
    rest = tuple([x.detach().to(torch.float32) if isinstance(x, Tensor) else x for x in rest])
    first, *further = columns.values()
    arguments = (first, *further) if rule is None else (rule, first, list(chain.from_iterable(further)))
    result = backend.through_dispatcher(op, *arguments, *rest, *flags)
    written = [key for key in present if is_written(name, key)]
    pairs = [pair for key in written for pair in zip(present[key], columns[key]) if pair[0] is not pair[1]]
    if pairs:
        torch._foreach_copy_(*map(list, zip(*pairs)))
    return result
