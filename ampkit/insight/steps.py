"""`on_step`: a report of each step of an optimizer, in plain numbers; `loss_scale`: the current loss scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch

from .. import kernels, validation
from ..iteration.found_inf import values_of
from ..optimizers.scales import moved_to
from ..registry import session_of, wrapper_of
from ..sharding import is_sharded, local, norm_over_processes
from .around_step import AroundStep, is_skipped, named_params, to_host
from .updates import Weights


class StepReport:
    """A report of a step, for the function that was passed to `on_step`. A value waits for the device when it is first read.

    ``step`` counts steps from 1, skipped ones included.
    """

    def __init__(self, optimizer: Any, step: int, weights: Weights | None = None) -> None:
        self.step, self._optimizer, self._weights = step, optimizer, weights

    def __getattr__(self, name: str) -> Any:
        if name not in ("_optimizer", "_weights"):
            raise AttributeError(name)
        raise RuntimeError(
            "A value of the report was not read inside of f, and gradients may be others by now. Read it there."
        )

    @cached_property
    def loss_scale(self) -> float:
        """The loss scale of the next iteration."""
        return loss_scale(self._optimizer)

    @cached_property
    def skipped(self) -> bool:
        """Whether the step was skipped for gradients that are not finite."""
        return is_skipped(self._optimizer)

    @cached_property
    def grad_norm(self) -> float:
        """The Euclidean norm of all gradients as the step used them: unscaled, and clipped. NaN where it was skipped."""
        if self.skipped:
            return math.nan
        return float(torch.linalg.vector_norm(torch.stack(self._norms))) if self._norms else 0.0

    @cached_property
    def norms(self) -> dict[str, float]:
        """The norm of each gradient as the step used it, by name of the parameter; empty if skipped, as the following."""
        return dict(zip(self._gradients(), torch.stack(self._norms).tolist(), strict=True)) if self._norms else {}

    @cached_property
    def gradients(self) -> dict[str, torch.Tensor]:
        """Float32 copies of the gradients on their devices, for histograms."""
        return {
            name: gradient.float() if factor is None else gradient.float() * moved_to(factor, gradient.device)
            for name, (gradient, factor) in self._gradients().items()
        }

    @cached_property
    def underflow(self) -> dict[str, float]:
        """The share of a gradient's elements that were denormal in lower precision at the current loss scale, by name.

        Denormal elements (without zeros) have lost digits, and smaller ones became 0: a growing share needs a higher loss scale.
        """
        session = session_of(self._optimizer)
        dtype = session.plan.lower_precision if session is not None and session.plan.enabled else None
        scale = self.loss_scale
        shares = {}
        for name, (gradient, _) in self._gradients().items():
            scaled = local(values_of(gradient)).float().abs() * scale
            is_denormal = (scaled > 0) & (scaled < torch.finfo(dtype or gradient.dtype).tiny)
            shares[name] = is_denormal.float().mean()
        return to_host(shares)

    @cached_property
    def lost_updates(self) -> dict[str, float] | None:
        """The share of updates that rounding lost in this step, by name; None in steps that were not measured."""
        if self._weights is None:
            return None
        return to_host({name: lost / total.clamp(min=1) for name, (lost, total) in self._weights.lost().items()})

    def _gradients(self) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
        """Gradients by name, each with the clipping factor that the step applied itself, or None."""
        if self.skipped:  # its gradients are dropped
            return {}
        wrapper, gradients = wrapper_of(self._optimizer), {}
        clip = None if wrapper is None else wrapper.gradients.clip
        mastered = set() if clip is None else {slot.param for slot in wrapper.gradients.stored}
        for name, param, _ in named_params(self._optimizer):
            if param.grad is not None:
                gradients[name] = param.grad, clip if param in mastered else None
        return gradients

    @cached_property
    def _norms(self) -> list[torch.Tensor]:
        gradients = list(self._gradients().values())
        values = [values_of(gradient) for gradient, _ in gradients]
        if any(map(is_sharded, values)):
            norms = [norm_over_processes([value], 2.0).float() for value in values]
        else:
            norms = list(kernels.multi_tensor_l2norm(values, per_tensor=True)[1])
        norms = [
            norm if factor is None else norm * moved_to(factor, norm.device).reshape(())
            for norm, (_, factor) in zip(norms, gradients)
        ]
        return [moved_to(norm, norms[0].device) for norm in norms]


class _OnStep(AroundStep):
    def __init__(self, optimizer: Any, f: Callable[[StepReport], Any], every: int, updates_every: int) -> None:
        self._f, self._every, self._updates_every, self._steps = f, every, updates_every, 0
        super().__init__(optimizer, "on_step")

    @contextmanager
    def around(self) -> Iterator[None]:
        self._steps += 1
        if self._steps % self._every:
            yield
            return
        is_measured = self._updates_every and self._steps % self._updates_every == 0
        report = StepReport(self.optimizer, self._steps, Weights(self.optimizer) if is_measured else None)
        yield
        try:
            with torch.no_grad():
                self._f(report)
        finally:
            del report._optimizer, report._weights


def on_step(optimizer: Any, f: Callable[[StepReport], Any], *, every: int = 1, updates_every: int = 0) -> AroundStep:
    """Call ``f(report)`` after each ``optimizer.step()``, skipped ones included; ``remove()`` of what is returned ends it.

    A `StepReport` has plain numbers: ``step``, ``loss_scale``, ``skipped``, ``grad_norm`` and ``norms`` of unscaled gradients,
    ``underflow``, and ``gradients`` for histograms. Nothing is computed that ``f`` does not read.

    >>> ampkit.on_step(optimizer, lambda report: print(report.step, report.loss_scale, report.skipped, report.grad_norm))
    1 32768.0 True nan
    2 32768.0 False 1.7320508

    ``f`` is called at every ``every``-th step. At every ``updates_every``-th step ``report.lost_updates`` has the share of updates
    that rounding lost, which takes a copy of the weights; at other steps it is None. Make it a multiple of ``every``.

    It works with any optimizer, at every level and without `initialize`; else call it after that. (Where a ``torch.amp.GradScaler``
    skips, it does not call the ``step`` of most optimizers, and there is no report.) Raises TypeError for what is no optimizer or
    no function, and ValueError for an ``every`` below 1.
    """
    if not callable(f):
        raise TypeError(f"on_step expects a function that takes the report of a step, found {type(f).__name__}.")
    if every < 1 or updates_every < 0:
        raise ValueError(f"on_step: every={every}, updates_every={updates_every}; expected at least 1, and at least 0.")
    return _OnStep(optimizer, f, every, updates_every)


def loss_scale(optimizer: Any, loss_id: int = 0) -> float:
    """The loss scale that the next loss of this optimizer is multiplied by; 1.0 for one that was not initialized.

    Waits for the device. Raises TypeError for what is no optimizer, and `LossIdError` for a ``loss_id`` that has no scaler.

    >>> ampkit.loss_scale(optimizer)
    65536.0
    """
    session = session_of(validation.optimizer(optimizer, "loss_scale"))
    if session is None or not session.plan.enabled:
        return 1.0
    return session.scaling.scaler(loss_id).loss_scale
