"""`Trend`: how large losses, weights, gradients and results of operators are over the iterations of a script.

What float32 shares is found by it: gradients that spike, at the operator whose result grew while its arguments did not, and a run
that diverges, whose losses and weights grow from one iteration to the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from .evidence import SPIKE, divisor_of, largest, subject
from .finder import Culprit
from .sites import Site
from .watching import Call, address

#: Gradients that are this many times those of all iterations before have spiked.
_SPIKES = 1000.0
#: A run whose losses and weights are this many times the first diverges. An operator that makes so much of its arguments spikes.
_RISES = 10.0
#: Weights, or gradients, that are as large as this are seldom those of a run that learns.
_LARGE = 100.0
_LEAST = 3  # iterations with which one is compared


class Trend:
    """Is told of an iteration in order."""

    def __init__(self) -> None:
        self.spike: Culprit | None = None  # the first
        self.spiked_at = 0
        self._iterations = 0
        self._losses: dict[Site | None, list[float]] = {}  # by the line that calls backward()
        self._weights: dict[torch.Tensor, float] = {}  # before the first step
        self._before: dict[Any, float] = {}  # the largest of earlier iterations
        self._now: dict[Any, float] = {}
        self._growth: dict[int, float] = {}  # of tensors of this iteration, by their addresses
        self._most: tuple[float, Call | None, str] = (_RISES, None, "")

    def _grow(self, key: Any, size: float, is_finite: bool = True) -> float:
        if is_finite:
            self._now[key] = max(self._now.get(key, 0.0), size)
        return size / self._before[key] if self._before.get(key) else 1.0

    def operator(self, call: Call, sizes: dict[torch.Tensor, float], needed: float, scale: float) -> None:
        """It has made tensors of these sizes, or ``needed`` as much; a gradient is multiplied by the loss ``scale``."""
        key, unit = (call.site, call.op, call.module, call.backward), scale if call.backward else 1.0
        written = {id(tensor) for tensor in call.written()}
        grown = 1.0
        for place, one in enumerate(call.inputs()):
            if one.is_floating_point() and address(one) not in self._growth and id(one) not in written:
                size = largest(one)
                growth = self._growth[address(one)] = self._grow((key, place), size / unit)
                if not one.requires_grad and growth > self._most[0]:  # a batch, which nothing here has made
                    self._most = growth, call, f"max |input| = {size:.4g}, which came with the batch"
            grown = max(grown, self._growth.get(address(one), 1.0))
        largest_made = max((size if math.isfinite(size) else needed for size in sizes.values()), default=0.0)
        growth = self._grow(key, largest_made / unit, all(map(math.isfinite, sizes.values())))
        self._growth.update((address(one), growth) for one in sizes if one.is_floating_point())
        if growth / grown > self._most[0]:
            text = f"max |result| of {subject(call)} is {largest_made:.4g}, {growth:.2g} times what it was"
            divisor = divisor_of(call.name, call.args)
            if divisor is not None and divisor.numel() and (smallest := float(divisor.abs().min())):
                text = f"the smallest divisor is {smallest:.4g}"
            self._most = growth / grown, call, text

    def loss(self, site: Site | None, value: float) -> None:
        self._losses.setdefault(site, []).append(value)

    def gradients(self, size: float, iteration: int) -> bool:
        """Whether these, the largest of them, are the first that spike. Of some that are not finite it is not known."""
        growth = self._grow("gradients", size) if math.isfinite(size) else 0.0
        of_one, call, text = self._most
        if self._iterations < _LEAST or growth < _SPIKES or size < _LARGE or call is None or self.spike is not None:
            return False
        if of_one**2 < growth or self._rise_of_weights() > _RISES:  # no operator alone has made it
            return False
        times = f"gradients are {growth:.2g} times the largest of the {self._iterations} iterations before"
        dtype = next(one.dtype for one in call.inputs() if one.is_floating_point())
        self.spike, self.spiked_at = Culprit(SPIKE, f"{text}; {times}", **call.where(), dtype=dtype), iteration
        return True

    def step(self, params: Iterable[torch.Tensor]) -> None:
        """An iteration ends."""
        for param in params:
            if param not in self._weights:
                self._weights[param] = largest(param)
        for key, size in self._now.items():
            self._before[key] = max(self._before.get(key, 0.0), size)
        self._iterations += bool(self._now)
        self._now.clear()
        self._growth.clear()
        self._most = _RISES, None, ""

    def _rise_of_weights(self) -> float:
        before = max(self._weights.values(), default=0.0)
        return max(map(largest, self._weights), default=0.0) / before if before else 1.0

    def divergence(self) -> str:
        """In words, if the losses have risen, and the weights; else empty."""
        before, weights = max(self._weights.values(), default=0.0), self._rise_of_weights()
        have_grown = not (weights <= _RISES or before * weights <= _LARGE)  # to NaN too
        for losses in self._losses.values():
            finite = [loss for loss in losses if math.isfinite(loss)] or [math.inf]
            is_sudden = len(finite) < 3 and not math.isfinite(losses[-1]) and math.isfinite(weights)
            has_risen = is_sudden or max(finite[-3:]) > _RISES * abs(finite[0])
            if has_risen and have_grown and len(losses) > 1 and math.isfinite(finite[0]):
                last = max(finite[-3:]) if len(finite) > 1 else losses[-1]
                rise = f"the loss rose from {finite[0]:.4g} to {last:.4g} over {len(losses)} iterations"
                return f"{rise}, the largest weight from {before:.4g} to {before * weights:.4g}"
        return ""

    def grown(self) -> str:
        """Where this iteration has grown beyond those before, in words."""
        growth, call, text = self._most
        is_known = call is not None and growth > _SPIKES and self._iterations >= _LEAST
        return f"{growth:.2g}-fold at {call.site}  {call.site.source}: {text}" if is_known else ""
