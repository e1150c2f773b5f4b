"""`Trend`: the sizes of losses, weights, gradients and results of operators over the iterations of a script.

It finds failures that float32 has too. Gradients spike at the first operator whose result has grown with them. A run
diverges if its losses and weights grow from one iteration to the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from .evidence import SPIKE, divisor_of, largest, subject
from .finder import Culprit
from .sites import Site
from .watching import Call

#: Gradients spike if they are this many times the largest of all earlier iterations.
_SPIKES = 1000.0
#: A run diverges if losses and weights are this many times the first. A result has grown if it is so many times earlier ones.
_RISES = 10.0
#: A run that learns seldom has weights or gradients as large as this.
_LARGE = 100.0
_LEAST = 3  # earlier iterations that a comparison needs


class Trend:
    """An observer of iterations; call its methods in the order of the events."""

    def __init__(self) -> None:
        self.spike: Culprit | None = None  # the first spike
        self.spiked_at = 0
        self._iterations = 0
        self._losses: dict[Site | None, list[float]] = {}  # by the line that calls backward()
        self._weights: dict[torch.Tensor, float] = {}  # before the first step
        self._earlier: dict[Any, float] = {}  # the largest size of earlier iterations
        self._sizes: dict[Any, float] = {}
        self._grown: list[tuple[float, Culprit]] = []  # operators of this iteration whose results have grown

    def _grow(self, key: Any, size: float, is_finite: bool = True) -> float:
        if is_finite:
            self._sizes[key] = max(self._sizes.get(key, 0.0), size)
        return size / self._earlier[key] if self._earlier.get(key) else 1.0

    def operator(self, call: Call, sizes: dict[torch.Tensor, float], needed: float, scale: float) -> None:
        """Note the sizes of an operator's results (``needed`` if not finite); a gradient is multiplied by the loss ``scale``."""
        key, unit = (call.site, call.op, call.module, call.backward), scale if call.backward else 1.0
        result = max((size if math.isfinite(size) else needed for size in sizes.values()), default=0.0)
        growth = self._grow(key, result / unit, all(map(math.isfinite, sizes.values())))
        if growth > _RISES:
            text = f"max |result| of {subject(call)} is {result:.4g}, {growth:.2g} times what it was"
            divisor = divisor_of(call.name, call.args)
            if divisor is not None and divisor.numel() and (smallest := float(divisor.abs().min())):
                text = f"the smallest divisor is {smallest:.4g}"
            dtype = next(x.dtype for x in sizes)
            self._grown.append((growth, Culprit(SPIKE, text, **call.where(), dtype=dtype)))

    def loss(self, site: Site | None, value: float) -> None:
        self._losses.setdefault(site, []).append(value)

    def gradients(self, size: float, iteration: int) -> bool:
        """Whether gradients of this largest size are the first that spike. Gradients that are not finite never count."""
        growth = self._grow("gradients", size) if math.isfinite(size) else 0.0
        if self._iterations < _LEAST or growth < _SPIKES or size < _LARGE or self.spike is not None:
            return False
        # The first operator that has grown so much is the cause of what follows; without one, no single operator is.
        culprit = next((culprit for grown, culprit in self._grown if grown**2 >= growth), None)
        if culprit is None or self._rise_of_weights() > _RISES:
            return False
        times = f"gradients are {growth:.2g} times the largest of the {self._iterations} iterations before"
        self.spike, self.spiked_at = replace(culprit, evidence=f"{culprit.evidence}; {times}"), iteration
        return True

    def step(self, params: Iterable[torch.Tensor]) -> None:
        """End an iteration: its sizes join those of earlier iterations."""
        for param in params:
            if param not in self._weights:
                self._weights[param] = largest(param)
        for key, size in self._sizes.items():
            self._earlier[key] = max(self._earlier.get(key, 0.0), size)
        self._iterations += bool(self._sizes)
        self._sizes.clear()
        self._grown.clear()

    def _rise_of_weights(self) -> float:
        before = max(self._weights.values(), default=0.0)
        return max(map(largest, self._weights), default=0.0) / before if before else 1.0

    def divergence(self) -> str:
        """Return in words how losses and weights have risen, if both have; else an empty string."""
        first_weight, weights = max(self._weights.values(), default=0.0), self._rise_of_weights()
        have_grown = not (weights <= _RISES or first_weight * weights <= _LARGE)  # also true for NaN
        for losses in self._losses.values():
            finite = [loss for loss in losses if math.isfinite(loss)] or [math.inf]
            is_sudden = len(finite) < 3 and not math.isfinite(losses[-1]) and math.isfinite(weights)
            has_risen = is_sudden or max(finite[-3:]) > _RISES * abs(finite[0])
            if has_risen and have_grown and len(losses) > 1 and math.isfinite(finite[0]):
                last = max(finite[-3:]) if len(finite) > 1 else losses[-1]
                rise = f"the loss rose from {finite[0]:.4g} to {last:.4g} over {len(losses)} iterations"
                return f"{rise}, the largest weight from {first_weight:.4g} to {first_weight * weights:.4g}"
        return ""

    def grown(self) -> str:
        """Return in words the first operator of this iteration whose result has grown like a spike; empty if none has."""
        has_earlier = self._iterations >= _LEAST
        culprits = (x for growth, x in self._grown if growth > _SPIKES and has_earlier)
        return next((f"at {x.site}  {x.source}: {x.evidence}" for x in culprits), "")
