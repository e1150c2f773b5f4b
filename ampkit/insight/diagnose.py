"""`diagnose`: the operator that made the first inf or NaN of an iteration, the reason, and the cures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, overload

from .against import Comparison, compare
from .cures import Cure, Trials, of_precision, of_scale
from .evidence import GIVEN, SCALE
from .finder import Culprit, Finder
from .words import short


@dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose` after ``operations`` operators; ``bool(diagnosis)`` says whether it found anything.

    ``given`` names tensors that were not finite before the iteration. ``iteration`` is that of a script, from 1. ``print`` it.
    """

    operations: int
    loss_scale: float | None = None
    culprit: Culprit | None = None
    cures: tuple[Cure, ...] = ()
    given: tuple[str, ...] = ()
    iteration: int | None = None
    note: str = ""

    def __bool__(self) -> bool:
        return self.culprit is not None or bool(self.given)

    def __str__(self) -> str:
        at = "" if self.loss_scale in (None, 1.0) else f" at loss scale {self.loss_scale:g}"
        if not self:
            return f"nothing found in {self.operations} operations{at}" + (f"; {self.note}" if self.note else "")
        lines = [f"{GIVEN}: {name}" for name in self.given]
        if (culprit := self.culprit) is not None:
            of = " in backward" if culprit.backward else ""
            dtype = short(culprit.dtype)
            lines.append(f"{culprit.kind}{of}{at}")
            if culprit.site is not None:
                lines.append(f"  line      {culprit.site}  {culprit.source}".rstrip())
            if culprit.op:
                lines.append(f"  function  {culprit.function} ({culprit.op}), {dtype}")
            if culprit.module:
                lines.append(f"  module    {culprit.module}")
            lines.append(f"  numbers   {culprit.evidence}")
            when = ", ".join(filter(None, (self.iteration and f"iteration {self.iteration}", culprit.rows)))
            lines += [f"  batch     {when}"] if when else []
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
      module    layers.0.attention
      numbers   max |input| = 412, exp needs 8.533e+178, float16 ends at 65504
      cure      policy={"torch.Tensor.exp": "fp32"}: finite, tried
      cure      bfloat16 (O4 or O5 without cast_model_type=): finite, tried

    With ``against="fp32"`` it looks for what is finite and yet wrong. The iteration runs once, each operator in its precision and
    in float32. Named are the lines whose results are further from float32's than their inputs and one rounding explain.

    >>> print(ampkit.diagnose(iteration, against="fp32"))
    against float32, in 32 operations: loss 3.10%, gradients 12.10% off
      error     inputs'   line
        12.10%     0.29%  loss.py:11  difference = log_p - log_q
                          torch.Tensor.__sub__ (aten.sub.Tensor), bfloat16

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
    run = finder.run(iteration)
    culprit, cures = finder.culprit, []
    if culprit is not None and culprit.kind != GIVEN and not finder.given:
        trials = Trials(iteration, run)
        if cures := of_scale(trials, run):
            culprit = replace(culprit, kind=SCALE)
        else:
            if run.scale is not None and run.scale > run.floor:
                at_floor = Finder()  # the first overflow at a high loss scale may be harmless
                at_floor.run(iteration, run.floor / run.scale)
                culprit = at_floor.culprit or culprit
            cures = of_precision(trials, culprit)
    return Diagnosis(finder.operations, run.scale, culprit, tuple(cures), tuple(finder.given))
