"""Checks of every operator's lists and flags, with errors that name the fault and its place."""

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ampkit.dtypes import LOWER_PRECISION
from ampkit.kernels.moments import packed_size

# Lists that no operator writes to; a join writes to its outputs alone.
_ONLY_READ = frozenset(("inputs", "xs", "ys", "tensors", "grads", "values"))
# The steps that take rests in the place of ``lower``, and packed moments in these lists.
_TAKE_RESTS = ("multi_tensor_sgd", "multi_tensor_adam")
_MOMENTS = ("exp_avgs", "exp_avg_sqs", "momenta")


def is_written(op: str, name: str) -> bool:
    """Whether an operator writes to its list of this name."""
    return name == "outputs" if op == "multi_tensor_join" else name not in _ONLY_READ


def check_lists(
    op: str, lists: Mapping[str, Sequence[Tensor]], flags: Mapping[str, Tensor | None] | None = None
) -> None:
    """Raise RuntimeError unless the lists have one length, equal shapes at each index, dtypes that an operator takes, memory, and,
    where it writes, one place for each element; and unless the flags have one element of their dtype.
    """
    (first_name, first), *others = lists.items()
    for name, tensors in others:
        if len(tensors) != len(first):
            raise RuntimeError(
                f"{op}: {first_name} has {len(first)} tensors, {name} has {len(tensors)}; pass lists of one length"
            )
    flags = {name: flag for name, flag in (flags or {}).items() if flag is not None}
    named = [(f"{name}[{i}]", name, i, tensor) for name, tensors in lists.items() for i, tensor in enumerate(tensors)]
    for place, name, i, tensor in named:
        if tensor.dtype is torch.uint8 and name in _MOMENTS and op in _TAKE_RESTS:
            fault = _fault_of_packed(tensor, first[i].numel())
        elif tensor.shape != first[i].shape:
            fault = f"has shape {list(tensor.shape)}, {first_name}[{i}] has shape {list(first[i].shape)}; they must be equal"
        else:
            fault = _fault(op, name, tensor, {other: column[i] for other, column in lists.items()})
        if fault is not None:
            raise RuntimeError(f"{op}: {place} {fault}")
    for name, flag in flags.items():
        dtype = torch.int64 if name == "first_bad" else torch.float32
        if flag.dtype is not dtype or flag.numel() != 1:
            raise RuntimeError(
                f"{op}: {name} is {flag.dtype} of shape {list(flag.shape)}; pass a {dtype} tensor of shape [1]"
            )
        if flag.device.type != "meta" and _was_freed(flag):
            raise RuntimeError(f"{op}: {name} has no memory: its storage was freed")
    places = [(place, tensor) for place, *_, tensor in named] + list(flags.items())
    without = [place for place, tensor in places if tensor.device.type == "meta"]
    if without and len(without) < len(places):  # results and flags of the others would be lost
        raise RuntimeError(f"{op}: {without[0]} is on the meta device, without data, and others are not")


def _fault(op: str, name: str, tensor: Tensor, row: Mapping[str, Tensor]) -> str | None:
    """The fault of a tensor in the list ``name``, None without any; ``row`` has the tensors of all lists at its index."""
    if name == "rests" or (name == "lower" and tensor.dtype is torch.int16 and op in _TAKE_RESTS):
        weight = row["weights" if name == "rests" else "params"]
        if tensor.dtype is not torch.int16 or weight.dtype not in LOWER_PRECISION:
            return (
                f"is the rest of a weight, {tensor.dtype} beside {weight.dtype}; expected torch.int16 "
                "beside torch.float16 or torch.bfloat16"
            )
    elif not (tensor.is_floating_point() or tensor.is_complex()) or tensor.dtype.itemsize == 1:  # float8
        return f"is {tensor.dtype}; expected a floating point or complex dtype"
    if _was_freed(tensor):
        return f"of shape {list(tensor.shape)} has no memory: its storage was freed, as FSDP does with what it has gathered"
    if is_written(op, name) and _overlaps_itself(tensor):
        strides = f"(shape {list(tensor.shape)}, strides {list(tensor.stride())})"
        return f"has several elements in one place in memory {strides}; pass a copy of it"
    if name == "outputs" and not tensor.is_complex() and (wide := [n for n in row if row[n].is_complex()]):
        return f"is {tensor.dtype} beside {row[wide[0]].dtype} in {wide[0]}"
    return None


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether several elements lie in one place for certain, as torch asks before it writes."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return False
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride()))


def _was_freed(tensor: Tensor) -> bool:
    if torch.compiler.is_compiling() or tensor.layout is not torch.strided or tensor.numel() == 0:
        return False
    return tensor.untyped_storage().nbytes() == 0


def _fault_of_packed(tensor: Tensor, numel: int) -> str | None:
    if tensor.shape == (packed_size(numel),) and tensor.is_contiguous():
        return None
    expected = f"packed moments of {numel} elements are a contiguous tensor of shape [{packed_size(numel)}]"
    return f"has shape {list(tensor.shape)}; {expected}"


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype of arithmetic on these tensors: float32, or wider where one of them is."""
    return functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors], torch.float32)
