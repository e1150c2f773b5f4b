"""`diagnose`: the operator that made the first inf or NaN of an iteration, the reason, and the cures.

Each cure is tried on the iteration. A trial runs the operators of a function, a module or everything on cast inputs, forward and
backward. That is the effect of a row of ``policy=``, of ``keep_fp32=`` or of another level, without a second `initialize`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, overload

import torch

from ..casting.engine import active_casting
from ..logs import logger
from ..registry import live_sessions
from .against import Comparison, compare
from .evidence import GIVEN, HINTS, SCALE, is_finite
from .finder import Culprit, Finder
from .repeating import Repetition
from .watching import Call, Watch, cast
from .words import short

#: The gradient of the loss if everything runs in another dtype: gradients of tensors that stay float16 must not overflow.
_SMALL = 2.0**-24
IN_BFLOAT16 = "bfloat16 (O4 or O5 without cast_model_type=)"


@dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose` after ``operations`` operators; ``bool(diagnosis)`` says whether it found anything.

    ``cures`` are changes that made loss and gradients finite, as code or in words. ``iteration`` is that of a script, from
    1. ``print`` it.
    """

    operations: int
    loss_scale: float | None = None
    culprit: Culprit | None = None
    cures: tuple[str, ...] = ()
    iteration: int | None = None
    note: str = ""

    def __bool__(self) -> bool:
        return self.culprit is not None

    def __str__(self) -> str:
        at = "" if self.loss_scale in (None, 1.0) else f" at loss scale {self.loss_scale:g}"
        if (culprit := self.culprit) is None:
            return f"nothing found in {self.operations} operations{at}" + (f"; {self.note}" if self.note else "")
        rows = {
            "line": culprit.site and f"{culprit.site}  {culprit.source}".rstrip(),
            "function": culprit.op and f"{culprit.function} ({culprit.op}), {short(culprit.dtype)}",
            "module": culprit.module,
            "numbers": culprit.evidence,
            "batch": ", ".join(filter(None, (self.iteration and f"iteration {self.iteration}", culprit.rows))),
        }
        lines = [f"{culprit.kind}{' in backward' * culprit.backward}{at}"]
        lines += [f"  {label:<9} {text}" for label, text in rows.items() if text]
        lines += [f"  cure      {cure}" for cure in self.cures]
        lines += [f"  {line}" for line in self.note.splitlines()]
        return "\n".join(lines)


@overload
def diagnose(iteration: Callable[[], Any], against: None = None) -> Diagnosis: ...


@overload
def diagnose(iteration: Callable[[], Any], against: str) -> Comparison: ...


def diagnose(iteration: Callable[[], Any], against: str | None = None) -> Diagnosis | Comparison:
    """Run ``iteration()``, the forward and backward pass on a batch that failed, and find the operator that failed first.

    Found is the operator with finite inputs and a result that is not finite, forward or backward, whose inf or NaN reached the
    loss or a gradient: not what spread it. A mask of -inf is none. Then cures are tried on the iteration, and named if they work.

    >>> def iteration():
    ...     loss = criterion(model(x), y)
    ...     with ampkit.scale_loss(loss, optimizer) as scaled_loss:
    ...         scaled_loss.backward()
    >>> print(ampkit.diagnose(iteration))
    overflow of the format at loss scale 65536
      line      model.py:31  weights = scores.exp()
      function  torch.Tensor.exp (aten.exp.default), float16
      numbers   max |input| = 412, exp needs 8.533e+178, float16 ends at 65504
      cure      policy={"torch.Tensor.exp": "fp32"}: finite, tried

    With ``against="fp32"`` it looks for what is finite and yet wrong. The iteration runs once, each operator in its precision and
    in float32. Named are the lines whose results are further from float32's than their inputs and one rounding explain.

    The iteration runs some ten times, and slowly; code that was compiled runs uncompiled. It may be of any script: with a session,
    with a ``torch.amp.GradScaler``, or with neither. Its part after the last backward pass (clipping, ``step``) does not run.
    Weights, buffers, gradients, optimizers, loss scales and random numbers are as before afterwards, also after an exception. Other
    objects that the iteration changes, such as counters and data loaders, are not: give it one batch.
    Raises TypeError for what cannot be called, ValueError for another ``against``, and what the iteration itself raises.
    """
    if not callable(iteration):
        raise TypeError(
            f"diagnose expects a function without arguments that runs forward and backward, found {type(iteration).__name__}."
        )
    if against is not None:
        if against != "fp32":
            raise ValueError(f"diagnose: against={against!r} is not accepted: expected 'fp32' or None.")
        return compare(iteration)
    finder = Finder()
    run = Repetition(finder).run(iteration)
    culprit, cures = finder.culprit, []
    if culprit is not None and culprit.kind != GIVEN:
        trials = Trials(iteration, run)
        if cures := of_scale(trials, run):
            culprit = replace(culprit, kind=SCALE)
        else:
            if run.scale is not None and run.scale > run.floor:
                at_floor = Finder()  # the first overflow at a high loss scale may be harmless
                Repetition(at_floor, run.floor / run.scale).run(iteration)
                culprit = at_floor.culprit or culprit
            cures = of_precision(trials, culprit)
    return Diagnosis(finder.operations, run.scale, culprit, tuple(cures))


# Cures


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
        return next(self.scale / 2**n for n in range(1, most + 1) if n == most or self.is_finite(trial(), 0.5**n))

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


def of_scale(trials: Trials, first: Repetition) -> list[str]:
    lower = trials.lower_scale()
    if lower is None:
        return []
    if first.backoff is None:
        return [f"loss_scale={lower:g}: finite, tried"]
    steps = math.ceil(math.log(trials.scale / lower) / -math.log(first.backoff) - 1e-9)
    return [f"harmless: finite at {lower:g}; the scale is found within {steps} step{'' if steps == 1 else 's'}"]


def of_precision(trials: Trials, culprit: Culprit) -> list[str]:
    if not trials.everywhere(torch.float32):
        hint = HINTS.get(culprit.kind)
        return ["float32 fails too: the model, not the precision" + (f"; {hint}" if hint else "")]
    cures = []
    if (text := trials.scoped(lambda call: call.function == culprit.function)) is not None:
        has_row = active_casting() is not None and culprit.function.startswith("torch.")
        row = f'policy={{"{culprit.function}": "fp32"}}' if has_row else f"{culprit.function} in float32"
        cures.append(f"{row}: {text}")
    path = f"{culprit.module}."
    if culprit.module and (text := trials.scoped(lambda call: f"{call.module}.".startswith(path))) is not None:
        change = f'keep_fp32=["{culprit.module}"]' if has_session() else f"{culprit.module} in float32"
        cures.append(f"{change}: {text}")
    if culprit.dtype is torch.float16 and trials.everywhere(torch.bfloat16):
        cures.append(f"{IN_BFLOAT16}: finite, tried")
    return cures or ["float32 is finite, no smaller change was, tried"]
