"""``ampkit diagnose``: a script that runs under a `Finder`, until its first loss that is not finite or some skips in a row.

The script is not edited. Its operators are watched one by one, so that it runs slowly. Its iterations cannot be repeated, so that
no cure is tried: `ampkit.diagnose` tries them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

from ..apex import running
from ..events import forwards, steps
from ..iteration.advice import calls_of_torch
from ..registry import current_session
from .cures import Cure
from .diagnose import Diagnosis
from .evidence import HINTS, OVERFLOW
from .finder import Culprit, Finder
from .repeating import unwatched
from .watching import tensors_in

EXAMPLE = "ampkit diagnose --device cpu tests/apex/scripts/classify.py --opt-level O1"
_HARMLESS = "none where skips end as the loss scale falls; else bfloat16 (O4 or O5), or float32 for the function"
_HOW_TO_TRY = "to have cures tried, give ampkit.diagnose() a function that runs forward and backward on this batch"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``--after``, and what ``ampkit run`` takes."""
    parser.add_argument(
        "--after",
        type=int,
        default=3,
        metavar="N",
        help="stop after N backward passes in a row with gradients that are not finite, as skipped steps have (3)",
    )
    running.add_arguments(parser)


def from_command_line(arguments: argparse.Namespace) -> int:
    """Run the script, and print what was found. The exit code is 1 where it was stopped, else the script's own."""
    if arguments.after < 1:
        print(f"ampkit diagnose: --after {arguments.after} is not accepted: expected at least 1.", file=sys.stderr)
        return 2
    watch = ScriptFinder(arguments.after)
    try:
        with torch.compiler.set_stance("force_eager"), watch:
            code = running.from_command_line(arguments)
    except _Stopped:
        print(watch.found)
        return 1
    except SystemExit:
        print(Diagnosis(watch.operations))
        raise
    if code == 0:
        print(Diagnosis(watch.operations))
    return code


class _Stopped(BaseException):
    """Raised through the script where the culprit is known."""


class ScriptFinder(Finder):
    """Judges every backward pass of a script, and stops the script with a `Diagnosis`, ``found``."""

    found: Diagnosis | None = None
    sources = (forwards, steps, calls_of_torch)

    def __init__(self, after: int) -> None:
        super().__init__()
        self._after, self._in_a_row = after, 0

    def step_begins(self, _: Any) -> None:
        self.forget()

    def backward_begins(self, roots: Sequence[Any]) -> None:
        earlier, self.culprit = self.culprit, None
        with unwatched():
            self._judge(tensors_in(roots))
        if self.culprit is not None:
            # Gradients that were not finite have ruined the weights: what made them is the cause.
            self._stop(earlier or self.culprit)

    def backward_ends(self) -> None:
        with unwatched():
            self._judge_gradients([param for one in list(self.modules) for param in one.parameters(recurse=False)])
        self._in_a_row = self._in_a_row + 1 if self.culprit is not None else 0
        if self.culprit is not None and self._in_a_row == self._after:
            self._stop(self.culprit)

    def _stop(self, culprit: Culprit) -> None:
        session = current_session()
        scale = session.scalers[0].loss_scale if session is not None and session.scalers else None
        is_of_scale = culprit.kind == OVERFLOW and culprit.backward and scale not in (None, 1.0)
        hint = _HARMLESS if is_of_scale else HINTS.get(culprit.kind)
        if hint and not is_of_scale and culprit.dtype is torch.float32:
            hint = f"it happens in float32: the model, not the precision; {hint}"
        cures = [Cure(text) for text in (hint and f"not tried: {hint}", _HOW_TO_TRY) if text]
        self.found = Diagnosis(self.operations, scale, culprit, tuple(cures))
        raise _Stopped
