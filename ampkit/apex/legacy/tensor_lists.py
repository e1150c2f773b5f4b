"""Checks that the functions of ``amp_C`` share: lists of tensors that fit together, and the no-op flag."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Lists = Sequence[Sequence[torch.Tensor]]


def checked_lists(
    op: str, tensor_lists: Lists, allowed: tuple[int, ...], noop_flag: torch.Tensor
) -> list[list[torch.Tensor]]:
    """Check that the lists fit together, and return them. Tensors of one size but different shapes are flattened."""
    lists = [list(tensors) for tensors in tensor_lists]
    if len(lists) not in allowed:
        raise RuntimeError(f"{op}: expected {' or '.join(map(str, allowed))} lists of tensors, found {len(lists)}")
    if noop_flag.dtype is not torch.int32 or noop_flag.numel() != 1:
        raise RuntimeError(
            f"{op}: the no-op flag must be an int32 tensor of one element, found {noop_flag.dtype} of shape "
            f"{list(noop_flag.shape)}; use torch.zeros(1, dtype=torch.int)"
        )
    if not lists[0]:
        raise RuntimeError(f"{op}: the first list of tensors is empty")
    for i, tensors in enumerate(lists):
        if len(tensors) != len(lists[0]):
            raise RuntimeError(
                f"{op}: list {i} has {len(tensors)} tensors, list 0 has {len(lists[0])}; pass lists of one length"
            )
        for j, (tensor, first) in enumerate(zip(tensors, lists[0])):
            if (wrong := _misfit(tensor, first)) is not None:
                raise RuntimeError(f"{op}: tensor {j} of list {i} {wrong}")
    for j, first in enumerate(lists[0]):
        if any(tensors[j].shape != first.shape for tensors in lists):
            for tensors in lists:
                tensors[j] = tensors[j].detach().view(-1)
    return lists


def _misfit(tensor: torch.Tensor, first: torch.Tensor) -> str | None:
    """The reason why a tensor does not fit its twin in the first list, or None."""
    if tensor.numel() != first.numel():
        return f"has {tensor.numel()} elements, its twin in list 0 has {first.numel()}"
    if tensor.device != first.device:
        return f"is on {tensor.device}, its twin in list 0 is on {first.device}"
    if not tensor.is_floating_point():
        return f"is {tensor.dtype}; expected a floating point dtype"
    if not _is_dense(tensor):
        return "is neither contiguous nor channels-last; call .contiguous() on it"
    return None


def _is_dense(tensor: torch.Tensor) -> bool:
    return (
        tensor.is_contiguous()
        or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
        or (tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d))
    )


@torch.no_grad()
def raise_flag(noop_flag: torch.Tensor, finding: torch.Tensor) -> None:
    """Set the flag where ``finding`` is above 0, without a wait of the host; never clear it."""
    noop_flag.masked_fill_(finding.to(noop_flag.device).reshape(noop_flag.shape) > 0, 1)
