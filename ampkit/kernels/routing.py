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
from typing import Any, overload

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

#: The value of ``first_bad`` while all tensors are finite: above every index.
NO_BAD = 2**62

#: Moments may be packed (uint8: moments.py), and rests are int16 (split.py); kernels refuse both in other lists.
_TAKEN = CASTABLE | {torch.uint8, torch.int16}


def serve(
    op: str,
    reference: Callable[..., Any],
    lists: Mapping[str, Tensors],
    rest: tuple[Any, ...] = (),
    flags: tuple[Tensor | None, ...] = (),
    rule: str | None = None,
) -> Any:
    """Compute ``reference(*rest, *flags, **lists)``, by a kernel where one takes the arguments; autograd does not see it.

    ``op`` names the compiled operator, which is given the lists, then ``rest`` and ``flags``; with a ``rule`` it is the step of
    that rule. Lists that are not empty have one length. A tensor in ``rest`` is read beside the lists. ``flags`` are ``found_inf``,
    which becomes 1.0 where something is not finite and is never cleared, and ``first_bad``, filled with NO_BAD before, which gets
    the smallest index of such a tensor. Raises RuntimeError, with nothing written, if the lists do not fit.
    """
    # What torch.no_grad() does, without a context object for every call.
    enabled = torch.is_grad_enabled()
    try:
        _set_grad_enabled(False)
        kernel = backend.direct.get(op)
        if kernel is not None and backend.kernel_devices and not is_compiling():
            # An error is one of the work itself, as of a launch: the work may be done, and is not tried again.
            if rule is None:
                result = kernel(*lists.values(), *rest, *flags)
            else:
                grads, *written = lists.values()
                result = kernel(rule, grads, written, *rest)
            if result is not NotImplemented:
                return result
        return _serve_refused(op, reference, lists, rest, flags, rule)
    except RuntimeError as error:
        _raise_as_torch_does(error, lists)
        raise
    finally:
        _set_grad_enabled(enabled)


def _raise_as_torch_does(error: RuntimeError, lists: Mapping[str, Tensors]) -> None:
    """Ask torch for as many bytes as a kernel could not allocate (csrc/check.h): torch's error has a type and says more."""
    if match := re.search(r"ampkit: out of memory: (\d+) bytes", str(error)):
        device = next(tensor.device for column in lists.values() for tensor in column)
        torch.empty(int(match[1]), dtype=torch.uint8, device=device)


def number(value: Number | None) -> tuple[float, Tensor | None]:
    """A number, 1 where it is None, as the compiled operators take it: as a float, or as a tensor that is read instead."""
    if isinstance(value, Tensor):
        return 1.0, value if value.is_floating_point() else value.to(torch.float32)
    return 1.0 if value is None else float(value), None


@overload
def moved_to(number: Tensor, device: torch.device) -> Tensor: ...
@overload
def moved_to(number: float, device: torch.device) -> float: ...
@overload
def moved_to(number: None, device: torch.device) -> None: ...
def moved_to(number: Number | None, device: torch.device) -> Number | None:
    """Move a number to a device. To a GPU, waits only for a copy from pinned memory, which may be written to meanwhile."""
    if not isinstance(number, Tensor) or number.device == device:
        return number
    return number.to(device, non_blocking=device.type == "cuda" and not number.is_pinned())


def _serve_refused(
    op: str, reference: Callable, lists: Mapping[str, Tensors], rest: tuple, flags: tuple, rule: str | None
) -> Any:
    """Serve arguments that a kernel has not taken at once."""
    tensors = list(chain.from_iterable(lists.values()))
    if any(map(is_sharded, tensors)):
        here = {name: [local(tensor) for tensor in column] for name, column in lists.items()}
        return serve(op, reference, here, rest, flags, rule)
    name = op if rule is None else f"multi_tensor_{rule.partition(' ')[0]}"
    not_empty = {key: column for key, column in lists.items() if column}  # an empty list stands for one that is absent
    check_lists(name, not_empty, dict(zip(("found_inf", "first_bad"), flags)))
    device = tensors[0].device
    rest = tuple([moved_to(x, device) for x in rest])
    one_device = all([tensor.device == device for tensor in (*tensors, *flags) if tensor is not None])
    # LAMB's kernel computes directions twice, from moments that must not be rounded in between.
    moments = (*lists["exp_avgs"], *lists["exp_avg_sqs"]) if rule == "lamb" else ()
    fits = all([t.dtype in _TAKEN for t in tensors]) and all([m.dtype is torch.float32 for m in moments])
    if one_device and device.type in backend.kernel_devices and fits:
        return _run_kernel(op, name, lists, rest, flags, rule)
    return reference(*rest, *flags, **lists)


def _run_kernel(op: str, name: str, lists: Mapping[str, Tensors], rest: tuple, flags: tuple, rule: str | None) -> Any:
    """Run the operator, over contiguous copies of tensors with gaps or another order, and copy back what it has written."""
    columns = {key: [tensor.contiguous() for tensor in column] for key, column in lists.items()}
    rest = tuple([x.detach().to(torch.float32) if isinstance(x, Tensor) else x for x in rest])
    first, *further = columns.values()
    arguments = (first, *further) if rule is None else (rule, first, list(chain.from_iterable(further)))
    result = backend.through_dispatcher(op, *arguments, *rest, *flags)
    written = [key for key in lists if is_written(name, key)]
    pairs = [pair for key in written for pair in zip(lists[key], columns[key]) if pair[0] is not pair[1]]
    if pairs:
        torch._foreach_copy_(*map(list, zip(*pairs)))
    return result
