"""Which parameters a backward pass came to, and whether the passes of two blocks, one inside the other, came to the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .optimizer_wrapper import OptimizerWrapper

Block = Any  # of scale_loss.py, which imports this module


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

    def any_of(self, wrappers: Iterable[OptimizerWrapper]) -> bool:
        """Whether it came to a parameter of these."""
        return any(self(slot.param) for wrapper in wrappers for slot in wrapper.gradients.slots)


class Nesting:
    """A block and one inside of it: finds out whether their gradients meet."""

    def __init__(self, outer: Block, inner: Block) -> None:
        self._outer, self._inner = outer, inner
        self._passes: list[None] = []  # backward passes of the outer's loss inside of the inner block
        if outer.scaled.requires_grad:
            outer.scaled.register_hook(self._before_pass_of_outer)

    def _before_pass_of_outer(self, _: torch.Tensor) -> None:
        if not self._inner.is_over:
            self._passes.append(None)
        elif not self._outer.is_over:
            self._inner.give_back_taken()

    def is_mixed(self) -> bool:
        """Whether parameters that one of them unscales have got gradients of the other, at another scale."""
        outer, inner = self._outer, self._inner
        if outer.scale is inner.scale:
            return False
        has_met = Reached(inner.scaled).any_of([*outer.named, *outer.unnamed_still_open()])
        if not has_met and self._passes:
            has_met = Reached(outer.scaled).any_of([*inner.named, *inner.unnamed])
        return has_met and float(outer.scale) != float(inner.scale)
