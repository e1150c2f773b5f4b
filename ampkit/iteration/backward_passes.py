"""What has to be known of a backward pass: the scale of its loss, and which parameters it came to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..optimizers.scales import Scale, inverse
from .slots import Slot


@dataclass(eq=False)
class BackwardPass:
    """What has to be known of a backward pass to unscale its gradients.

    Its loss was multiplied by ``scale``. ``local`` says that it ran under ``DDP.no_sync()``. ``exact_in_place`` says that the scale
    is a power of two, so that bfloat16 can be divided by it without rounding. ``done`` are the slots of several optimizers that one
    of them has handled; None where there is only one optimizer. ``was_reached`` tells whether the pass came to a parameter.
    """

    scale: Scale
    local: bool = False
    exact_in_place: bool = False
    done: set[Slot] | None = None
    was_reached: Callable[[torch.Tensor], bool] | None = None

    def __post_init__(self) -> None:
        self.inv = inverse(self.scale)

    def take(self, slots: list[Slot]) -> list[Slot]:
        """Those that no other optimizer has handled; they count as handled from here on."""
        if self.done is None:
            return slots
        remaining = [slot for slot in slots if slot not in self.done]
        self.done.update(slot for slot in remaining if slot.owners > 1)
        return remaining

    def was_cleared(self, slot: Slot) -> bool:
        """Whether a parameter without a gradient had one, which was cleared inside of the block."""
        return self.was_reached is not None and self.was_reached(slot.param)


class Probe:
    """Whether backward passes went to all of a graph: ``backward(inputs=...)`` does not come to a leaf that nobody names."""

    def __init__(self) -> None:
        self._begun: list[None] = []
        self._arrived: list[None] = []

    def put_into(self, scaled: torch.Tensor) -> torch.Tensor:
        """``scaled``, with one leaf more in its graph."""
        leaf = torch.zeros((), device=scaled.device, requires_grad=True)
        leaf.register_hook(lambda _: self._arrived.append(None))
        probed = scaled + leaf
        probed.register_hook(lambda _: self._begun.append(None))
        return probed

    def is_missed(self) -> bool:
        """Whether a pass went to some inputs only."""
        return len(self._arrived) < len(self._begun)


class Reached:
    """Whether a backward pass came to a parameter: its graph is walked when somebody asks, which is rare.

    Of a pass that a ``probe`` has missed nobody knows where it went: it came to no parameter, as far as can be told.
    """

    def __init__(self, scaled: torch.Tensor, probe: Probe | None = None) -> None:
        self._scaled = scaled
        self._probe = probe
        self._params: set[torch.Tensor] | None = None

    def __call__(self, param: torch.Tensor) -> bool:
        if self._probe is not None and self._probe.is_missed():
            return False
        if self._params is None:
            self._params = set()
            waiting = [self._scaled.grad_fn]
            seen = set(waiting)
            while waiting:
                node = waiting.pop()
                following = () if node is None else node.next_functions
                if not following and hasattr(node, "variable"):  # what adds to a parameter's gradient leads nowhere
                    self._params.add(node.variable)
                for one, _ in following:
                    if one not in seen:
                        seen.add(one)
                        waiting.append(one)
        return param in self._params
