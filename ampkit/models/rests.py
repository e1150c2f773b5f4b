"""The bits that a bfloat16 weight lacks of its float32 value, where the master is split (``master_weights="split"``).

The weight itself is the upper half of the value: see `ampkit.kernels.split`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import kernels


class Rest:
    """The lower half of one float32 value, ``bits``, beside the weight that is the upper half.

    ``before`` is the weight as it was when the two last belonged together, as long as no step was taken: until then DDP and others
    write the same values again. ``lender`` has the slot of a split master whose value a script may still hold, and write to.
    ``loaded`` are bits that wait for the weight that ``load_state_dict`` is about to write. ``drops`` counts how often a write to
    the weight has made the bits meaningless.
    """

    def __init__(self, lower: torch.Tensor, bits: torch.Tensor) -> None:
        self.before: torch.Tensor | None
        self.start(lower, bits)
        self.lender: Callable[[], Any] | None = None
        self.loaded: torch.Tensor | None = None
        self.drops = 0

    def value(self, lower: torch.Tensor) -> torch.Tensor:
        """The float32 value that both are together."""
        return kernels.join(lower, self.bits)

    def start(self, lower: torch.Tensor, bits: torch.Tensor) -> None:
        """These bits belong to ``lower``, and no step was taken since."""
        self.bits, self.before = bits, lower.detach().clone()

    def put(self, lower: torch.Tensor, bits: torch.Tensor) -> None:
        """These bits belong to ``lower`` as it is now."""
        if self.before is not None:
            self.start(lower, bits)
        else:
            self.bits = bits

    def put_value(self, lower: torch.Tensor, value: torch.Tensor, counted: bool) -> None:
        """Split ``value`` into ``lower`` and these bits; torch counts the write to ``lower`` if it is to be ``counted``."""
        weights, bits = kernels.split(value.detach(), self.bits.dtype)
        (lower if counted else lower.data).copy_(weights)
        self.put(lower, bits)

    def settle(self) -> None:
        """Take back what a script has written to the value that it was lent."""
        if self.lender is not None and (slot := self.lender()) is not None:
            slot.master.settle(slot)

    @torch.no_grad()
    def follow(self, lower: torch.Tensor, is_written: bool) -> None:
        """Drop the bits of what was written over, if torch has counted a write: nobody knows which elements that was.

        Other storage at the same version is the same weight elsewhere (``model.to(device)``, another memory format), or was put
        there through ``.data``. Its bits stay: the two together round to what is there.
        """
        if self.bits.shape != lower.shape:
            self.bits, self.before = torch.zeros_like(lower, dtype=self.bits.dtype), None
        elif self.bits.device != lower.device:
            self.bits = self.bits.to(lower.device)
            self.before = None if self.before is None else self.before.to(lower.device)
        if not is_written:
            return
        if self.before is None:
            self.bits.zero_()
            self.drops += 1
        else:
            self.put(lower, torch.where(self.before == lower, self.bits, 0))
