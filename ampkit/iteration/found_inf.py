"""Whether the gradients of a backward pass are finite: written by kernels on their device, read by the host where it must."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import kernels
from ..errors import ConfigurationError


class FoundInf:
    """What kernels found in the gradients that one ``scale_loss`` block made.

    ``flag`` (float32, shape []) is not 0 where a gradient is not finite. `index_for` gives the place for the index of the first
    such tensor of a list. ``scaler`` is the loss scaler whose iteration the block is part of, None for an optimizer that the block
    does not name; ``moves_scale`` tells whether that scale has moved by it. Before ``is_judged`` more blocks may write to it.
    ``name_of`` names a parameter in its model. ``loss`` is the last block's.
    """

    loss: torch.Tensor | None = None

    def __init__(self, flag: torch.Tensor, scaler: Any = None, name_of: Callable[[Any], str] = repr) -> None:
        self.flag, self.scaler, self._name_of = flag, scaler, name_of
        self.moves_scale = False
        self.is_judged = scaler is None
        self._lists: list[tuple[Sequence[torch.Tensor], torch.Tensor]] = []
        self._overflowed: bool | None = None

    def index_for(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Where to write the index (int64, shape []) of the first of these whose gradient is not finite."""
        if not tensors:
            return None
        index = constant(kernels.NO_BAD, torch.int64, self.flag.device).clone()
        self._lists.append((tensors, index))
        return index

    @property
    def overflowed(self) -> bool:
        """Whether a gradient was not finite. Waits for the device."""
        if self._overflowed is None:
            self._overflowed = is_set(self.flag)
        return self._overflowed

    def first_nonfinite(self) -> str | None:
        """The name of the first parameter whose gradient was not finite here; None where no kernel has written one."""
        for tensors, index in self._lists:
            if (first := int(index)) < len(tensors):
                return self._name_of(tensors[first])
        return None


@functools.cache
def constant(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of shape [], to be cloned: that takes a third of the time of making one."""
    return torch.full((), value, dtype=dtype, device=device)


def is_capturing(tensor: torch.Tensor) -> bool:
    """Whether a CUDA graph is captured that may be about this tensor."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def refuse_to_read(tensor: torch.Tensor) -> None:
    """Raise where the host would have to wait for a graph that is being captured."""
    if is_capturing(tensor):
        raise ConfigurationError(
            "While a CUDA graph is captured the host cannot learn whether gradients are finite, and something asks: the step of an "
            "ordinary optimizer, step_was_skipped() or state_dict(). Steps of ampkit.optimizers, and of torch's with fused=True, "
            "are decided on the device; with loss_scale=1.0 and check_gradients=False nothing is."
        )


def is_set(flag: torch.Tensor) -> bool:
    """Whether a flag is not 0. Waits for its device."""
    refuse_to_read(flag)
    return flag.item() != 0.0


def is_known_clean(flag: torch.Tensor) -> bool:
    """Whether the host can tell without waiting that a flag is 0: on the CPU."""
    return flag.device.type == "cpu" and flag.item() == 0.0


def places_for(
    found: FoundInf | None, tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Where a kernel writes that one of these is not finite, and the index of the first: nowhere, where nothing is checked."""
    return (None, None) if found is None else (found.flag, found.index_for(tensors))
