"""What the gradients of masters are clipped by, from ``clip_grad_norm_`` to the steps that use it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..errors import ConfigurationError
from .master_weights import Seen, Slot


class Clipping:
    """The clippings of one optimizer's gradients since they came, as one factor.

    ``pending`` is what the step has yet to multiply the gradients of masters by, where it reads the model's as they are. A step
    multiplies what it reads and not what is there: where the same gradients serve another step, that clips them again.
    """

    def __init__(self) -> None:
        self.pending: torch.Tensor | None = None
        self.forget()

    def forget(self) -> None:
        """Other gradients come, or none."""
        self.pending = self._factor = None
        self._clipped: list[tuple[Slot, Seen]] = []
        self._is_used = False

    def add(self, coefficient: torch.Tensor) -> None:
        """Clip by this, and by what was added since the last step."""
        self.pending = coefficient if self.pending is None else self.pending * coefficient
        before = None if self._is_used else self._factor
        self._factor = coefficient if before is None else before * coefficient
        self._is_used = False

    def note(self, slots: Iterable[Slot]) -> None:
        """The gradients of these are the ones that were clipped."""
        self._clipped = [(slot, Seen.now(slot.param.grad)) for slot in slots]

    def refuse_unseen_writes(self) -> None:
        """Raise where gradients were written to after they were clipped, and no step has used them since."""
        for slot, before in () if self._is_used else self._clipped:
            gradient = slot.param.grad
            if slot.converted is None and gradient is not None and not before.is_still(gradient):
                raise ConfigurationError(
                    f"The gradient of a parameter of shape {tuple(slot.param.shape)} was written to after "
                    "ampkit.clip_grad_norm_. Clip last, after every backward pass and every change of gradients."
                )

    def clip_again_or_forget(self) -> None:
        """After a step: gradients that are still there are clipped again for the next; others were not clipped."""
        if not self._is_used:
            return
        if self._factor is not None and all(before.is_still(slot.param.grad) for slot, before in self._clipped):
            self.pending, self._is_used = self._factor, False
        else:
            self.forget()

    def end_step(self) -> None:
        """A step has used it."""
        self.pending, self._is_used = None, True
