"""What the gradients of weights with rests are clipped by, from ``clip_grad_norm_`` to the steps that use it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..errors import ConfigurationError
from .slots import Slot

Seen = tuple[Slot, torch.Tensor | None, int]  # a gradient and its version, or none


class Clipping:
    """The clippings of one optimizer's gradients since they came, as one factor.

    ``pending`` is what the step has yet to multiply the gradients by. A step multiplies what it reads and not what is there:
    where the same gradients serve another step, that clips them again.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Other gradients come, or none."""
        self.pending: torch.Tensor | None = None
        self._factor: torch.Tensor | None = None
        self._clipped: list[Seen] = []
        self._is_used = False

    def add(self, coefficient: torch.Tensor, slots: Iterable[Slot]) -> None:
        """Clip the gradients of these by this, and by what was added since the last step."""
        self.pending = coefficient if self.pending is None else self.pending * coefficient
        before = None if self._is_used else self._factor
        self._factor = coefficient if before is None else before * coefficient
        self._is_used = False
        self._clipped = [seen(slot) for slot in slots]

    def refuse_unseen_writes(self) -> None:
        """Raise where gradients were written to after they were clipped, and no step has used them since."""
        for one in () if self._is_used else self._clipped:
            slot = one[0]
            if slot.param.grad is not None and not is_still(one):
                raise ConfigurationError(
                    f"The gradient of a parameter of shape {tuple(slot.param.shape)} was written to after "
                    "ampkit.clip_grad_norm_. Clip last, after every backward pass and every change of gradients."
                )

    def clip_again_or_forget(self) -> None:
        """After a step: gradients that are still there are clipped again for the next; others were not clipped."""
        if not self._is_used:
            return
        if all(map(is_still, self._clipped)):
            self.pending, self._is_used = self._factor, False
        else:
            self.forget()

    def end_step(self) -> None:
        """A step has used it."""
        self.pending, self._is_used = None, True


def seen(slot: Slot) -> Seen:
    """A gradient as it is now."""
    gradient = slot.param.grad
    return slot, gradient, 0 if gradient is None else gradient._version


def is_still(one: Seen) -> bool:
    """Whether the gradient is the same tensor, and nobody has written to it since, as far as torch counts."""
    slot, before, version = one
    gradient = slot.param.grad
    return gradient is before and (gradient is None or gradient._version == version)
