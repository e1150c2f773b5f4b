"""Cures of an iteration that is not finite: each candidate is tried, and kept if loss and gradients are finite.

A trial runs the operators of a function, a module or everything on cast inputs, forward and backward. That is the effect of a row
of ``policy=``, of ``keep_fp32=`` or of another level, without a second `initialize`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..casting.engine import active_casting
from ..logs import logger
from ..registry import live_sessions
from .evidence import HINTS, is_finite
from .finder import Culprit
from .repeating import Repetition
from .watching import Call, Watch, cast


@dataclass(frozen=True)
class Cure:
    """A change that made loss and gradients finite: ``setting`` as code, ``text`` in words."""

    text: str
    setting: str = ""

    def __str__(self) -> str:
        return f"{self.setting}: {self.text}" if self.setting else self.text


# The gradient of the loss if everything runs in another dtype: gradients of tensors that stay float16 must not overflow.
_SMALL = 2.0**-24


class Trial(Watch):
    """A `Watch` that notes whether loss and gradients are ``finite``. Operators for which ``applies`` is true run on inputs that
    are cast from lower precision to ``dtype``, and their results keep that dtype.
    """

    def __init__(
        self, applies: Callable[[Call], bool] = lambda call: False, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self._applies, self._dtype, self.finite = applies, dtype, True

    def on_loss(self, losses: list[torch.Tensor]) -> None:
        self.finite = self.finite and all(map(is_finite, losses))

    def around(self, call: Call) -> Any:
        if call.op.is_view or call.op._schema.is_mutable or not self._applies(call):
            return call()
        # Autograd checks the dtype of a gradient between nodes, and accumulates gradients there.
        if call.backward and call.name in ("cast", "add"):
            return call()
        args, kwargs = cast((call.args, call.kwargs), self._dtype)
        return call.op(*args, **kwargs)


class Trials:
    """Repeated runs of an iteration, each with one change. ``first`` is the run that failed."""

    def __init__(self, iteration: Callable[[], Any], first: Repetition) -> None:
        self._iteration, self._first = iteration, first
        self.scale = first.scale or 1.0

    def is_finite(self, trial: Trial, factor: float = 1.0, seed: float = 1.0) -> bool:
        """Whether loss and gradients are finite in this trial. A trial that raises an exception counts as not finite."""
        try:
            Repetition(trial, factor, seed).run(self._iteration)
        except Exception as error:
            logger.debug("A trial of diagnose failed: %s", error)
            return False
        return trial.finite

    def everywhere(self, dtype: torch.dtype) -> bool:
        """Whether loss and gradients are finite if lower precision is replaced by ``dtype``, without a loss scale."""
        return self.is_finite(Trial(lambda call: True, dtype), 1 / self.scale, _SMALL)

    def lower_scale(self, trial: Callable[[], Trial] = Trial) -> float | None:
        """Search the highest loss scale with finite loss and gradients, by powers of two; None if there is none."""
        most = math.floor(math.log2(self.scale / self._first.floor))
        if most < 1 or not self.is_finite(trial(), 2.0**-most):
            return None
        fails, works = 0, most
        while works - fails > 1:
            middle = fails + 1 if fails == 0 else (fails + works) // 2  # a single halving is the most likely answer
            fails, works = (fails, middle) if self.is_finite(trial(), 2.0**-middle) else (middle, works)
        return self.scale * 2.0**-works

    def scoped(self, applies: Callable[[Call], bool]) -> str | None:
        """Return the text of a cure by float32 for some of the operators; None if float32 does not help."""
        trial = functools.partial(Trial, applies)
        if self.is_finite(trial()):
            return "finite, tried"
        if self._first.backoff is not None and (lower := self.lower_scale(trial)) is not None:
            return f"finite at loss scale {lower:g}, tried"
        return None


def has_session() -> bool:
    """Whether there is a session that casts calls; at O0 all casts are the script's own."""
    return any(session.plan.enabled and session.plan.casts_calls for session in live_sessions)


def in_bfloat16() -> str:
    """Return the words for a change from float16 to bfloat16: another level with a session, else another dtype."""
    if has_session():
        return "bfloat16 (O4 or O5 without cast_model_type=)"
    return "torch.bfloat16 for torch.float16 (with ampkit: O4 or O5)"


def of_scale(trials: Trials, first: Repetition) -> list[Cure]:
    lower = trials.lower_scale()
    if lower is None:
        return []
    if first.backoff is None:
        return [Cure("finite, tried", f"loss_scale={lower:g}")]
    steps = math.ceil(math.log(trials.scale / lower) / -math.log(first.backoff) - 1e-9)
    return [Cure(f"harmless: finite at {lower:g}; the scale is found within {steps} step{'' if steps == 1 else 's'}")]


def of_precision(trials: Trials, culprit: Culprit) -> list[Cure]:
    if not trials.everywhere(torch.float32):
        hint = HINTS.get(culprit.kind)
        return [Cure("float32 fails too: the model, not the precision" + (f"; {hint}" if hint else ""))]
    cures = []
    if (text := trials.scoped(lambda call: call.function == culprit.function)) is not None:
        has_row = active_casting() is not None and culprit.function.startswith("torch.")
        row = f'policy={{"{culprit.function}": "fp32"}}' if has_row else f"{culprit.function} in float32"
        cures.append(Cure(text, row))
    path = f"{culprit.module}."
    if culprit.module and (text := trials.scoped(lambda call: f"{call.module}.".startswith(path))) is not None:
        cures.append(Cure(text, f'keep_fp32=["{culprit.module}"]' if has_session() else f"{culprit.module} in float32"))
    if culprit.dtype is torch.float16 and trials.everywhere(torch.bfloat16):
        cures.append(Cure("finite, tried", in_bfloat16()))
    return cures or [Cure("float32 is finite, no smaller change was, tried")]
