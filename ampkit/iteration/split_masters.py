"""Split masters: float32 masters that are no tensors, since the model's bfloat16 weights hold the upper half of them.

The optimizer's groups hold the weights, and a fused step updates weight and rest together (`ampkit.kernels.split`). Whoever asks
for masters (``master_params``) is lent their float32 values one at a time, and what is written to one goes back when the next is
asked for, or, if torch has counted the write, before the value is used next.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..errors import ConfigurationError

_grad = torch.Tensor.grad


class LentMaster(nn.Parameter):
    """The float32 value of a split master, as long as the weight stands still.

    Its gradient is the master's, made when somebody looks at it. After the next step the value is an old one: looking at its
    gradient raises then.
    """

    _is_old = False
    _slot: weakref.ref[Any] | None = None

    @property
    def grad(self) -> torch.Tensor | None:
        self._convert()
        return _grad.__get__(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self._convert()
        _grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __del__(self) -> None:
        # A list of all masters, written to after the last was yielded, may be gone before the step asks.
        slot = self._slot and self._slot()
        if slot is not None and not self._is_old:
            slot.master.settle(slot, self)

    def _convert(self) -> None:
        self._refuse_if_old()
        slot = self._slot and self._slot()
        if slot is not None:
            slot.master.convert(slot)

    def _refuse_if_old(self) -> None:
        if self._is_old:
            raise ConfigurationError(
                f"A float32 value of shape {tuple(self.shape)} from ampkit.master_params was kept over optimizer.step(), and "
                "with split masters it is no master, but a copy of one. Call master_params(optimizer) again after each step, or "
                "use master_weights=True, whose masters are tensors that stay."
            )


class SplitMaster:
    """What a `Slot` has in the place of a master that is split: the float32 gradient, and the value that is lent out."""

    dtype = torch.float32

    def __init__(self, rest_dtype: torch.dtype) -> None:
        self.rest_dtype = rest_dtype
        self._gradient: torch.Tensor | None = None
        self._lent: weakref.ref[LentMaster] | None = None
        self._gradients: Callable[[], Any] = lambda: None
        self._version = self._ptr = 0

    def belongs_to(self, slot: Any, gradients: Any) -> None:
        """Have these `Gradients`, while they live, convert what there is before anybody sees the gradient."""
        self._gradients = weakref.ref(gradients)

    def convert(self, slot: Any) -> None:
        """Somebody looks at the gradient, on a value that may have been lent before the backward pass."""
        if slot.converted is None and slot.param.grad is not None and (gradients := self._gradients()) is not None:
            gradients.convert_for_reader()

    @property
    def raw_grad(self) -> torch.Tensor | None:
        """The float32 gradient, if there is one."""
        return self._gradient

    @raw_grad.setter
    def raw_grad(self, value: torch.Tensor | None) -> None:
        self._gradient = value
        lent = self._lent() if self._lent is not None else None
        if lent is None:
            return
        if value is None or (value.shape == lent.shape and value.device == lent.device):
            _grad.__set__(lent, value)  # else an old gradient would pass for one that a script has put there
        else:
            self.end_step()

    def lend(self, slot: Any) -> Iterator[nn.Parameter]:
        """Yield the float32 value, with its gradient, and take back what was written to either."""
        value = slot.entry.current(slot.param)
        lent = self._lent() if self._lent is not None else None
        if lent is None or lent.shape != value.shape:
            self.end_step()
            lent = LentMaster(value, requires_grad=slot.param.requires_grad)
            self._lent, lent._slot = weakref.ref(lent), weakref.ref(slot)
        else:
            lent.data = value
        lent._is_old = False
        _grad.__set__(lent, self.raw_grad)
        self._version, self._ptr = lent._version, lent.data_ptr()
        slot.entry.rest.lender = lent._slot
        try:
            yield lent
        finally:
            self._take_back(slot, lent)

    def settle(self, slot: Any, lent: LentMaster | None = None) -> None:
        """Take back what was written to it after the next was asked for: before the value is used, and when what was lent goes."""
        if lent is None and self._lent is not None:
            lent = self._lent()
        if lent is None:
            return
        is_written = lent._version != self._version or lent.data_ptr() != self._ptr  # ``p.data = ...``
        if is_written or _grad.__get__(lent) is not self.raw_grad:
            self._take_back(slot, lent)

    def move_like(self, param: torch.Tensor) -> None:
        """There is nothing to move: the value is where the weight is, and a gradient is made there anew."""

    def end_step(self) -> None:
        """After a step: what is lent out is an old value."""
        lent, self._lent = self._lent() if self._lent is not None else None, None
        if lent is not None:
            lent._is_old = True

    @torch.no_grad()
    def _take_back(self, slot: Any, lent: LentMaster) -> None:
        lent._refuse_if_old()
        gradient = _grad.__get__(lent)
        if gradient is not self.raw_grad:
            self.raw_grad = gradient
            slot.note_gradient()
        is_counted, self._version, self._ptr = lent._version != self._version, lent._version, lent.data_ptr()
        # A write through .data is not counted here either, and a value that nobody wrote to is what it was.
        slot.entry.put(slot.param, lent, is_counted)
