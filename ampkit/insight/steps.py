"""`on_step`: a report of each step of an optimizer, in plain numbers; `check_updates`: the updates that rounding loses.

Both wrap ``optimizer.step``, also the patch of `ampkit.initialize`: they see gradients and weights as a script sees them.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

import torch

from .. import kernels, validation
from ..api import step_was_skipped
from ..dtypes import LOWER_PRECISION
from ..errors import ConfigurationError
from ..iteration.found_inf import values_of
from ..logs import logger, printable
from ..optimizers.scales import moved_to
from ..patching import PatchSet
from ..registry import session_of, wrapper_of
from ..sharding import is_sharded, norm_over_processes
from .updates import Weight, Weights, named_params, to_host
from .words import short

#: The first steps are all measured, so that a warning comes soon.
_FIRST = 5


class AroundStep:
    """A wrapper that runs every ``optimizer.step()``, skipped ones included, inside of `around`, until `remove`.

    ``function`` is the name of the public function for error messages.
    """

    def __init__(self, optimizer: Any, function: str) -> None:
        self.optimizer = validation.optimizer(optimizer, function)
        self._wrapper = wrapper_of(self.optimizer)
        self._patches, self._is_active = PatchSet(), True
        original = self.optimizer.step

        @functools.wraps(original)
        def step(_: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_active or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            if self._wrapper is not wrapper_of(self.optimizer) and wrapper_of(self.optimizer) is not None:
                raise ConfigurationError(
                    f"{function}() was called before initialize(), whose steps it cannot see. Call {function}() after initialize()."
                )
            with self.around():
                return original(*args, **kwargs)

        self._patches.set(self.optimizer, "step", types.MethodType(step, self.optimizer))

    def around(self) -> AbstractContextManager[None]:
        raise NotImplementedError

    def remove(self) -> None:
        """Stop observing steps, and restore ``optimizer.step``."""
        self._is_active = False
        self._patches.restore()


def is_skipped(optimizer: Any) -> bool:
    """Whether the step that ends was skipped. With torch.amp.GradScaler torch's fused optimizers skip on the device, by a flag."""
    flag = getattr(optimizer, "found_inf", None)
    return step_was_skipped(optimizer) or (flag is not None and bool(flag))


class StepReport:
    """A report of a step, for the function that was passed to `on_step`. A value waits for the device when it is first read.

    ``step`` counts steps from 1, skipped ones included.
    """

    def __init__(self, optimizer: Any, step: int) -> None:
        self.step, self._optimizer = step, optimizer

    def __getattr__(self, name: str) -> Any:
        if name != "_optimizer":
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
        return math.nan if self.skipped else math.hypot(*self.norms.values())

    @cached_property
    def norms(self) -> dict[str, float]:
        """The norm of each gradient as the step used it, by name of the parameter; empty if it was skipped."""
        if self.skipped:  # its gradients are dropped
            return {}
        named = {name: param for name, param, _ in named_params(self._optimizer) if param.grad is not None}
        values = [values_of(param.grad) for param in named.values()]
        if any(map(is_sharded, values)):
            norms = [norm_over_processes([value], 2.0).float() for value in values]
        else:
            norms = list(kernels.multi_tensor_l2norm(values, per_tensor=True)[1])
        wrapper = wrapper_of(self._optimizer)
        # A factor that the step applies itself.
        if wrapper is not None and (clip := wrapper.gradients.clip) is not None:
            stored = {slot.param for slot in wrapper.gradients.stored}
            norms = [
                norm * moved_to(clip, norm.device).reshape(()) if param in stored else norm
                for param, norm in zip(named.values(), norms)
            ]
        return to_host(dict(zip(named, norms)))


class _OnStep(AroundStep):
    def __init__(self, optimizer: Any, f: Callable[[StepReport], Any], every: int) -> None:
        self._f, self._every, self._steps = f, every, 0
        super().__init__(optimizer, "on_step")

    @contextmanager
    def around(self) -> Iterator[None]:
        self._steps += 1
        if self._steps % self._every:
            yield
            return
        report = StepReport(self.optimizer, self._steps)
        yield
        try:
            with torch.no_grad():
                self._f(report)
        finally:
            del report._optimizer


def on_step(optimizer: Any, f: Callable[[StepReport], Any], *, every: int = 1) -> AroundStep:
    """Call ``f(report)`` after each ``optimizer.step()``, skipped ones included; ``remove()`` of what is returned ends it.

    A `StepReport` has plain numbers: ``step``, ``loss_scale``, ``skipped``, ``grad_norm`` and ``norms`` of unscaled gradients.
    Nothing is computed that ``f`` does not read.

    >>> ampkit.on_step(optimizer, lambda report: print(report.step, report.loss_scale, report.skipped, report.grad_norm))
    1 32768.0 True nan
    2 32768.0 False 1.7320508

    ``f`` is called at every ``every``-th step.

    It works with any optimizer, at every level and without `initialize`; else call it after that. (Where a ``torch.amp.GradScaler``
    skips, it does not call the ``step`` of most optimizers, and there is no report.) Raises TypeError for what is no optimizer or
    no function, and ValueError for an ``every`` below 1.
    """
    if not callable(f):
        raise TypeError(f"on_step expects a function that takes the report of a step, found {type(f).__name__}.")
    if every < 1:
        raise ValueError(f"on_step: every={every}; expected at least 1.")
    return _OnStep(optimizer, f, every)


class UpdateCheck(AroundStep):
    """The result of `check_updates`: figures so far, and `remove`.

    ``steps`` counts the measured steps. ``shares`` has the share of updates that were lost in them, by name. ``print`` it.
    """

    def __init__(self, optimizer: Any, every: int, share: float, function: str = "check_updates") -> None:
        self._every, self._share = every, share
        self.steps = self._seen = 0
        self._lost: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._has_told = False
        super().__init__(optimizer, function)

    @property
    def shares(self) -> dict[str, float]:
        """The share of lost updates of each parameter, by name. Waits for the device."""
        return to_host({name: lost / total.clamp(min=1) for name, (lost, total) in self._lost.items()})

    @contextmanager
    def around(self) -> Iterator[None]:
        self._seen += 1
        is_measured = self._seen <= _FIRST or self._seen % self._every == 0
        weights = Weights(self.optimizer) if is_measured else None
        yield
        with torch.no_grad():
            if weights is not None and not is_skipped(self.optimizer) and (lost := weights.counts()):
                self._count(lost)
                if self.steps >= _FIRST and not self._has_told:
                    self._tell()

    def _count(self, counts: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.steps += 1
        for name, (lost, total) in counts.items():
            lost_before, total_before = self._lost.get(name, (0, 0))
            self._lost[name] = lost + lost_before, total + total_before

    def _tell(self) -> None:
        shares = {name: share for name, share in self.shares.items() if share > self._share}
        if not shares:
            return
        self._has_told = True
        worst = max(shares, key=lambda name: shares[name])
        weight = next(weight for weight in Weights(self.optimizer, 64).list if weight.name == worst)
        lost = f"{shares[worst]:.0%} of the updates of {worst!r} ({short(weight.param.dtype)}, lr {weight.lr:g})"
        more = f" ({len(shares) - 1} more tensors lose over {self._share:.0%}: print what check_updates returned)"
        more *= len(shares) > 1
        logger.warning("%s were lost in %d steps%s: %s", lost, self.steps, more, _cure(weight))

    def __str__(self) -> str:
        worst_first = sorted(self.shares.items(), key=lambda item: -item[1])
        lines = [f"  {share:7.2%}  {printable(name)}" for name, share in worst_first]
        return "\n".join([f"updates lost in {self.steps} steps", *lines])


def _cure(weight: Weight) -> str:
    dtype = weight.param.dtype
    if weight.rest is not None or dtype not in LOWER_PRECISION:
        return "weights in float32 lose them where updates are below 6e-8 of a weight: look at the learning rate."
    cure = 'initialize(model, optimizer, opt_level="O5") trains their float32 values, for 2 bytes per parameter'
    cure += '; rounding="stochastic" of ampkit.optimizers loses none on average' * (dtype is torch.bfloat16)
    return f"weights in {short(dtype)} without masters. {cure}."


def check_updates(optimizer: Any, every: int = 100, *, share: float = 0.5) -> UpdateCheck:
    """Measure at the following steps how many updates rounding loses, and warn of tensors that lose more than a ``share``.

    >>> check = ampkit.check_updates(optimizer)  # warns after five steps, and names the cure
    >>> print(check)
    updates lost in 5 steps
      100.00%  norm.weight
       97.31%  proj.weight

    It takes any optimizer and model, initialized or not; call it after `initialize`. Measured are the first five steps and then
    every ``every``-th one; these take a copy of the weights and a pass over them. The warning comes once. What is returned has
    ``shares``, by name, ``steps``, and ``remove()``.

    Raises TypeError for what is no optimizer, and ValueError for an ``every`` below 1 or a ``share`` outside of 0 to 1.
    """
    if every < 1 or not 0 <= share <= 1:
        raise ValueError(f"check_updates: every={every}, share={share}; expected at least 1, and from 0 to 1.")
    return UpdateCheck(optimizer, every, share)


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
