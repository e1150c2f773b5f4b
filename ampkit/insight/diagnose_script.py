"""``ampkit diagnose``: a script that runs under a `Finder`, until a loss, or gradients in a row, are not finite for good.

The iterations of a script cannot be repeated, so no cure is tried. `ampkit.diagnose` tries cures on the file that ``--save`` has
written. While the loss scale still falls to a value at which the gradients fit, the script continues.
"""

from __future__ import annotations

import argparse
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ..casting.tensors import params_of
from ..dtypes import LOWER_PRECISION
from ..events import forwards, steps
from ..iteration.block import calls_of_torch
from ..patching import PatchSet
from ..scripts import running
from .diagnose import IN_BFLOAT16, Diagnosis
from .evidence import DIVERGES, DIVISION, ENDS_OF_GROWTH, HINTS, LOG, OVERFLOW, SPIKE, is_finite, largest
from .finder import Culprit, Finder
from .observed import culprit_of, observe
from .repeating import rule_of, unwatched
from .sites import look
from .steps import is_skipped
from .trend import Trend
from .watching import Call, Enough, Watch, address, tensors_in
from .words import short

EXAMPLE = "ampkit diagnose --device cpu tests/apex/scripts/classify.py --opt-level O1"
_AGAIN = "again with --save FILE, which keeps the batch and the weights of this iteration: ampkit.diagnose() tries cures on them"
_SMALLEST = "float32 for the function, or an eps of 1e-6: below 6e-8, as 1e-8 is, it is 0 in float16"
_OF_OPTIMIZER = (
    "the optimizer divides in float16, where its eps of 1e-8 is 0: O2 steps in float32 values; else eps=1e-4"
)
_SAVED = """saved     {path}: what the models were called with in this iteration, and their weights. To have cures tried:
            saved = torch.load({path!r}); model.load_state_dict(saved["models"][0]); args, kwargs = saved["calls"][0]
            print(ampkit.diagnose(lambda: loss_of(model(*args, **kwargs)).backward()))  # with the script's own loss"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--after``, ``--save``, and the options of ``ampkit run``."""
    parser.add_argument(
        "--after",
        type=int,
        default=3,
        metavar="N",
        help="stop after N backward passes in a row with gradients that no loss scale makes finite (3)",
    )
    parser.add_argument("--save", metavar="FILE", help="write the batch and the weights of the iteration that is named")
    running.add_arguments(parser, observes=True)


def from_command_line(arguments: argparse.Namespace) -> int:
    """Run the script, and print the diagnosis. The exit code is 1 if the script was stopped, else its own."""
    watch = ScriptFinder(arguments.after, arguments.save)
    code, error = observe(arguments, watch)
    if isinstance(error, Exception):
        if (culprit := culprit_of(error, watch)) is not None:
            print(Diagnosis(watch.operations, None, *culprit, iteration=watch.iteration), flush=True)
    elif code == 0 or error is not None:
        print(watch.found or watch.at_the_end(), flush=True)
        code = int(watch.found is not None)
    if error is not None:
        raise error
    return code


class ScriptFinder(Finder):
    """A `Finder` that judges every backward pass of a script; it may stop the script, with a `Diagnosis` in ``found``."""

    found: Diagnosis | None = None
    sources = (forwards, steps, calls_of_torch)

    def __init__(self, after: int, path: str | None = None) -> None:
        super().__init__()
        self.iteration = 1
        self._after, self._path, self._in_a_row, self._descents = after, path, 0, 0
        self._calls: list[tuple[nn.Module, Any, Any]] = []  # of models, with their arguments, in this iteration
        self._scale: float | None = None  # the loss scale, if there is one
        self._floor = 0.0  # the lowest loss scale
        self._falls = self._is_loss_finite = self._is_saved = False
        self._loss: torch.Tensor | None = None  # before it is multiplied by the loss scale
        self._trend, self._bad = Trend(), ""
        self._gradient_origins: dict[int, Culprit | None] = {}  # their origins by address, during a step
        self._first: Any = None

    # Events of the script

    def on_results(self, call: Call, sizes: dict[torch.Tensor, float], origin: Culprit | None) -> None:
        is_origin = origin is not None and (origin.site, origin.op) == (call.site, str(call.op))
        if call.site is not None:
            self._trend.operator(call, sizes, (is_origin and origin.needed) or 0.0, self._scale or 1.0)

    def __enter__(self) -> Any:
        if self._path is not None:
            self._listening.enter_context(PatchSet()).put_around(nn.Module, "__call__", self._call)
        return super().__enter__()

    def _call(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self.is_inside:
            self._calls.append((module, args, kwargs))
        return original(module, *args, **kwargs)

    def block_begins(self, loss: torch.Tensor, scaler: Any) -> None:
        with unwatched():
            self._is_loss_finite, self._loss = is_finite(loss), loss
            self._scale, backoff, self._floor = rule_of(scaler)
        self._falls = backoff is not None

    def step_begins(self, optimizer: Any) -> None:
        with unwatched():
            self._trend.step(params_of(optimizer))
            grads = [address(param.grad) for param in params_of(optimizer) if param.grad is not None]
        self._gradient_origins = {x: self._origins[x] for x in grads if x in self._origins}
        self.forget()
        self._origins.update(self._gradient_origins)  # clipping may have changed their values

    def step_ends(self, optimizer: Any, skipped: bool) -> None:
        with unwatched():
            if skipped or is_skipped(optimizer):
                self.culprit = None  # a skipped step has ruined nothing
            elif self.culprit is not None and not all(map(is_finite, (*params_of(optimizer), *Watch.statistics(self)))):
                self._stop(self.culprit)
        for x in self._gradient_origins:
            self._origins.pop(x, None)
        self._first = self._first or weakref.ref(optimizer)
        self.iteration += self._first() is optimizer
        self._calls.clear()

    def backward_begins(self, roots: Sequence[Any]) -> None:
        earlier, self.culprit = self.culprit, None
        losses, self._loss = tensors_in(roots) if self._loss is None else [self._loss], None
        with unwatched():
            self.on_loss(tensors_in(roots))
            if len(losses) == 1 and losses[0].numel() == 1 and not losses[0].is_complex():
                self._trend.loss(look()[0], float(losses[0].detach()))
        if self.culprit is not None and not (self._falls and self._is_loss_finite):
            self._save()
            # A step by hand may have ruined weights with gradients that were not finite: their culprit is the cause.
            self._stop(earlier or self.culprit)

    def backward_ends(self) -> None:
        with unwatched():
            params = [param for module in list(self.modules) for param in module.parameters(recurse=False)]
            gradients = [param.grad for param in params if param.grad is not None]
            self.on_gradients(gradients)
            if self._trend.gradients(max(map(largest, gradients), default=0.0) / (self._scale or 1.0), self.iteration):
                self._save()
        if self.culprit is None:
            self._in_a_row = 0
        elif self._fits_at(self.culprit) is None:
            self._in_a_row += 1
            self._save()  # before a step that may ruin the weights
            where = self._trend.grown() or f"at {self.culprit.site}  {self.culprit.source}: {self.culprit.evidence}"
            self._bad = f"the gradients of iteration {self.iteration} fit at no loss scale: {where}"
            if self._in_a_row == self._after:
                self._stop(self.culprit)
        else:
            self._in_a_row, self._descents = 0, self._descents + 1
            if grown := self._trend.grown():
                self._bad = f"in iteration {self.iteration} they grew {grown}"

    def _fits_at(self, culprit: Culprit) -> float | None:
        """Return the highest loss scale at which the culprit's result is finite; None if there is none."""
        if not self._falls or culprit.kind != OVERFLOW or not self._scale:
            return None
        if not culprit.backward:  # the overflow is in the scaled loss itself
            return self._scale / 2 if self._is_loss_finite and self._scale > self._floor else None
        if culprit.needed is None or culprit.needed / self._scale > torch.finfo(culprit.dtype).max:
            return None
        fits = 2.0 ** math.floor(math.log2(torch.finfo(culprit.dtype).max * self._scale / culprit.needed))
        return fits if self._floor <= fits < self._scale else None

    # The diagnosis

    def at_the_end(self) -> Diagnosis:
        with unwatched():
            culprit = self._cause(self.culprit if self._in_a_row else None)
        if culprit is not None:
            return self._diagnosis(culprit)
        note = f"the loss scale fell {self._descents} times, as it does, to what gradients need" * bool(self._descents)
        saved = f"nothing was saved to {self._path}" * (self._path is not None and not self._is_saved)
        return Diagnosis(self.operations, self._scale, note="; ".join(filter(None, (note, self._bad, saved))))

    def _cause(self, culprit: Culprit | None) -> Culprit | None:
        """Return the cause behind a culprit, or of finite numbers that go wrong: gradients that spiked, or a run that diverges."""
        if culprit is not None and culprit.kind not in ENDS_OF_GROWTH:
            return culprit
        if self._trend.spike is not None or not (rise := self._trend.divergence()):
            return self._trend.spike or culprit
        return replace(culprit or Culprit("", "", torch.float32), kind=DIVERGES, evidence=rise)

    def _diagnosis(self, culprit: Culprit) -> Diagnosis:
        hint, is_finite_too = HINTS.get(culprit.kind), culprit.kind in (SPIKE, DIVERGES)
        if hint and torch.float16 in (culprit.dtype, culprit.cast_from) and culprit.kind in (DIVISION, LOG):
            hint = _OF_OPTIMIZER if "addcdiv" in culprit.op else f"{hint}; {_SMALLEST}"
        # Another precision would not cure these.
        is_of_model = culprit.dtype not in LOWER_PRECISION and culprit.cast_from is None and bool(hint)
        if is_of_model and not is_finite_too:
            hint = f"it happens in {short(culprit.dtype)}: the model, not the precision; {hint}"
        elif culprit.kind == OVERFLOW:
            change = f"{IN_BFLOAT16}, " * (culprit.dtype is torch.float16)
            hint = f"{change}float32 for the function, or {hint}"
        is_of_model |= is_finite_too
        cures = (hint if is_of_model else f"not tried: {hint}",) if hint else ()
        iteration = self._trend.spiked_at if culprit.kind == SPIKE else self.iteration if culprit.op else None
        note = []
        if self._in_a_row == self._after:
            note.append(f"stopped   after {self._after} such backward passes in a row (--after {self._after})")
        if culprit.kind == OVERFLOW and (grown := self._trend.grown()):
            note.append(f"grew      {grown}")
        if self._is_saved:
            note.append(_SAVED.format(path=self._path))
        elif self._path is not None:
            note.append(f"saved     nothing to {self._path}: the iteration was over")
        elif not is_of_model:
            note.append(f"next      {_AGAIN}")
        return Diagnosis(self.operations, self._scale, culprit, cures, iteration=iteration, note="\n".join(note))

    def _stop(self, culprit: Culprit) -> None:
        with unwatched():
            cause = self._cause(culprit) or culprit
        self.found = self._diagnosis(cause)
        raise Enough

    def _save(self) -> None:
        """Save this iteration: the batch, and weights that no step of it has changed. A spike is not replaced by what follows."""
        if self._path is None or self._trend.spiked_at not in (0, self.iteration):
            return
        models = dict.fromkeys(module for module, _, _ in self._calls)
        calls = [(args, kwargs) for _, args, kwargs in self._calls]
        state = {"iteration": self.iteration, "models": [x.state_dict() for x in models], "calls": calls}
        with unwatched():
            torch.save(tree_map_only(torch.Tensor, lambda x: x.detach().cpu().clone(), state), self._path)
        self._is_saved = True
