"""``ampkit check``: the first iterations of a script, and what each level would change in it; or a report on a checkpoint."""

from __future__ import annotations

import argparse
import logging
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..casting.cpp_wrappers import library
from ..casting.narrow_gradients import LARGE, is_large
from ..casting.tensors import params_of
from ..dtypes import CASTABLE, LOWER_PRECISION
from ..events import forwards, steps
from ..iteration.block import calls_of_torch
from ..logs import is_rank_zero, logger
from ..patching import PatchSet
from ..plan import OPT_LEVELS
from ..policy import CastKind, Policy
from ..registry import current_session
from ..scripts import running
from . import files
from .explain import Explanation, ModuleRow, explain, known
from .observed import observe
from .record.arithmetic import product_of, tensor_cores
from .record.reasons import EXACT, Regions
from .repeating import unwatched
from .sites import look
from .standstill import Standstill
from .steps import is_skipped
from .tuning.ways import fused, optimizers_for
from .watching import Call, Enough, Watch, address, tensors_in
from .words import collapsed, columns, pattern, percent, short

EXAMPLE = "ampkit check --iterations 2 --device cpu tests/apex/scripts/classify.py --opt-level O1"
#: A script whose optimizers do not step ends after this many forward and backward passes per requested iteration.
_PASSES = 100
#: Functions that clip gradients, or compute their norm for clipping: they are wrong for gradients that are not unscaled yet.
_CLIPPING = {
    "torch.nn.utils.clip_grad_norm_",
    "torch.nn.utils.clip_grad_value_",
    "torch.nn.utils.clip_grads_with_norm_",
    "torch.nn.utils.get_total_norm",
    "torch.Tensor.clamp_",
    "torch.Tensor.clip_",
}
_NO_GRADIENTS = "no backward pass has reached the optimizer: make it last, over model.parameters() of the loss's model"
_WRAPPERS = ("DistributedDataParallel", "DataParallel", "OptimizedModule")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--iterations``, and the options of ``ampkit run``."""
    parser.add_argument(
        "--iterations", type=int, default=3, metavar="N", help="end the script after N steps of each optimizer (3)"
    )
    running.add_arguments(parser, observes=True)


def from_command_line(arguments: argparse.Namespace) -> int:
    """Run the script's first iterations and print the report. The exit code is 1 if it names a mistake, else 0.

    A file or a folder that does not end in .py is a checkpoint, which files.py reads. An exception of the script is raised again,
    after a report on the part that ran.
    """
    if not (arguments.module or arguments.target.endswith(".py")) and os.path.exists(arguments.target):
        return files.print_report(arguments.target)
    observer = Observer(arguments.iterations)
    code, error = observe(arguments, observer)
    if "No inf checks were recorded" in str(error):  # by torch's GradScaler
        observer.note(_NO_GRADIENTS)
    if code == 0 or observer.roots:
        lines, has_mistakes = report(arguments.target, observer)
        code = int(has_mistakes)
        if is_rank_zero():
            print("\n".join(lines), flush=True)
    if error is not None:
        raise error
    return code


class Observer(Watch, logging.Handler):
    """A record of what a script did inside of ``with``, for ``iterations`` steps. ampkit's warnings are among its ``mistakes``."""

    sources = (forwards, steps, calls_of_torch)

    def __init__(self, iterations: int) -> None:
        Watch.__init__(self)
        logging.Handler.__init__(self, logging.WARNING)
        self.iterations = iterations
        self.steps: dict[Any, int] = {}  # by optimizer
        self.passes = 0  # forward and backward, before the first step
        self.roots: dict[nn.Module, None] = {}  # modules that the script itself calls
        self.products = _Products()
        self.as_it_is: Explanation | None = None  # after the latest step, when moments exist
        self.standstill = Standstill()
        self._initialized: list[nn.Module] = []
        self.not_cast: Counter[str] = Counter()
        self.mistakes: dict[str, None] = {}
        self.does = "float32"  # the precision that the script itself uses, in words
        self._enough = False
        self.unregistered: dict[nn.Module, str] = {}  # submodules that no model has registered, and their lines
        self.casts: dict[CastKind, Counter[str]] = {CastKind.LOWER_PRECISION_FP: Counter(), CastKind.FP32: Counter()}
        self._rules = {getattr(rule.owner, rule.name): rule for rule in Policy().rules() if rule.kind in self.casts}
        self._regions = Regions()
        self._is_scaled = self.has_scaler = False

    def __enter__(self) -> Any:
        patches = self._listening.enter_context(PatchSet())
        self._regions.watch(patches)
        logger.addHandler(self)
        patches.callback(logger.removeHandler, self)
        self._listening.enter_context(_Calls(self))
        return super().__enter__()

    @property
    def models(self) -> list[nn.Module]:
        """The models of `initialize`, and the modules with parameters that the script called, without wrappers and submodules."""
        models = list(self._initialized)
        for model in self.roots:
            while type(model).__name__ in _WRAPPERS:
                model = next(iter(model.children()))
            if next(model.parameters(), None) is not None and model not in models:
                models.append(model)
        return [x for x in models if not any(x is not other and x in other.modules() for other in models)]

    # The end of the script

    def _end_if_enough(self) -> None:
        if self._enough:
            raise Enough

    def step_begins(self, optimizer: Any) -> None:
        self._end_if_enough()
        with _unobserved():
            self.standstill.step_begins(optimizer, self.models)

    def step_ends(self, optimizer: Any, skipped: bool) -> None:
        self.steps[optimizer] = self.steps.get(optimizer, 0) + 1
        self._is_scaled = False
        # An optimizer that steps less often than another does not prolong the run.
        counts = self.steps.values()
        self._enough = min(counts) >= self.iterations or max(counts) >= 2 * self.iterations
        with _unobserved():
            self.standstill.step_ends(optimizer, not (skipped or is_skipped(optimizer)))
            self._look()
        # Float16 weights may be frozen, and their gradients scaled by hand.
        is_float16 = self.does.endswith("in float16") and "weights" not in self.does
        if is_float16 and not self.has_scaler:
            self.note(f"{self.does}, without a loss scale: small gradients underflow to 0; O1 and O2 scale the loss")

    def _look(self) -> None:
        session = current_session()
        if session is not None and session.plan.enabled:
            self._initialized, self.does = session.models, f"ampkit at {session.plan.opt_level}"
            self.as_it_is = explain(session)
            if not session.plan.casts_calls:
                self._tell_of_own_casts()
            return
        if self._initialized:  # by a session that has ended since
            return
        self.as_it_is = explain(self.models, list(self.steps))
        if "autocast" not in self.does:
            owners = [*map(params_of, self.steps), *(model.parameters() for model in self.models)]
            dtypes = {param.dtype for params in owners for param in params}
            others = [short(dtype) for dtype in (*LOWER_PRECISION, *EXACT) if dtype in dtypes]
            beside = "float32, beside " * (torch.float32 in dtypes)
            self.does = f"{beside}weights in {others[0]}" if others else "float32"
            if not others:
                self._tell_of_own_casts()

    def _tell_of_own_casts(self) -> None:
        """Note matrix products in lower precision that are due to neither a level, nor torch.autocast, nor the dtype of weights."""
        if lower := [short(dtype) for dtype in LOWER_PRECISION if dtype in self.products.dtypes]:
            self.does += f", with casts of its own: products in {lower[0]}"

    def _pass(self) -> None:
        self.passes += not self.steps
        self._enough = self._enough or self.passes >= _PASSES * self.iterations

    # Operators, modules and functions

    def around(self, call: Call) -> Any:
        if call.op._schema.name == "aten::_amp_foreach_non_finite_check_and_unscale_":
            self._is_scaled = False
        elif self._is_scaled and call.function in _CLIPPING and self._reads_gradients(call):
            name = call.function.rpartition(".")[2]
            self.note(f"{name} before GradScaler.unscale_: gradients are multiplied by the loss scale there")
        out = call()
        self.products.note(call, out)
        return out

    def _reads_gradients(self, call: Call) -> bool:
        addresses = {address(x) for x in call.inputs()}
        params = (param for model in self.models for param in model.parameters() if param.grad is not None)
        return any(address(param.grad) in addresses for param in params)

    def forward_begins(self, module: nn.Module, args: Any) -> None:
        if not self.is_inside and not isinstance(module, torch.jit.ScriptModule):
            self._end_if_enough()
            is_new = module not in self.roots
            self.roots.setdefault(module)
            if is_new and not self.steps:
                with _unobserved():
                    self._look()
            if next(module.parameters(), None) is not None:
                self._pass()
        elif module not in self.modules and any(param.requires_grad for param in module.parameters()):
            self.unregistered.setdefault(module, str(look()[0]))
        if not torch.is_grad_enabled() and any(param.requires_grad for param in module.parameters(recurse=False)):
            self.standstill.cut("no_grad()", look()[0])
        super().forward_begins(module, args)

    def backward_ends(self) -> None:
        with _unobserved():
            self.standstill.backward_ends(param for model in self.models for param in model.parameters())

    def note_call(self, function: Any, args: Sequence[Any], kwargs: Any) -> None:
        # Of a getter by its name: a session may have patched it.
        is_data = getattr(getattr(function, "__self__", None), "__name__", "") == "data"
        if is_data or function is torch.Tensor.detach:
            self.standstill.cut(".data" if is_data else "detach()", look()[0])
        region = self._regions.innermost if current_session() is None else None
        if region is not None and region.enabled and region.dtype is not None:
            self.does = f"torch.autocast in {short(region.dtype)}"
        rule = self._rules.get(function)
        if rule is None:
            return
        tensors = [x for x in args if isinstance(x, Tensor)]
        if tensors and not any(x.dim() for x in tensors):  # 0-dim tensors, as torch's GradScaler uses them
            return
        dtypes = {x.dtype for x in tensors}
        if torch.float64 in dtypes or any(dtype.is_complex for dtype in dtypes):
            self.not_cast[f"{rule.name} of float64 or complex tensors"] += 1
            return
        self.casts[rule.kind][rule.name] += 1
        if rule.kind is CastKind.FP32:
            return
        if region is not None and not region.enabled:
            self.not_cast[f"{rule.name} inside torch.autocast(enabled=False)"] += 1
        elif not self.is_inside:
            self.not_cast[f"at O2, O3 and O5 {rule.name} outside of every module's forward"] += 1

    # Mistakes

    def emit(self, record: logging.LogRecord) -> None:
        self.note(record.getMessage())

    def note(self, mistake: str) -> None:
        self.mistakes.setdefault(mistake)

    def backward_begins(self, _: Sequence[Any]) -> None:
        self._end_if_enough()
        self._pass()

    def block_begins(self, loss: Tensor, scaler: Any) -> None:
        self._is_scaled = current_session() is None
        self.has_scaler |= self._is_scaled


class _Calls(TorchFunctionMode):
    """A mode that reports calls of torch functions to an `Observer`."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._observer.note_call(function, args, kwargs or {})
        return function(*args, **(kwargs or {}))


class _Products:
    """A count of FLOPs of forward passes: the total, and by verdict those that Tensor Cores cannot run in lower precision."""

    def __init__(self) -> None:
        self.flops = 0
        self.dtypes: set[torch.dtype] = set()
        self.off: dict[str, Counter[str]] = {}  # by verdict, and by the paths of modules

    def note(self, call: Call, out: Any) -> None:
        formula = None if call.backward else product_of(call.op._schema.name.partition("::")[2])
        if formula is None or (made := tensors_in(out)[0]).dtype not in CASTABLE:
            return
        product, of = formula(call.args, made), call.module or call.function.rpartition(".")[2]
        self.flops += product.flops
        if any(x.requires_grad for x in call.inputs()):  # data may be prepared in any precision
            self.dtypes.add(made.dtype)
        if (verdict := tensor_cores(torch.bfloat16, product.sizes)) != "yes":
            self.off.setdefault(verdict, Counter())[of] += product.flops

    def in_words(self) -> str:
        """Return the sizes to pad, most FLOPs first."""
        if not self.flops:
            return "no matrix product that a level casts"
        lines = []
        for verdict, flops in sorted(self.off.items(), key=lambda item: -item[1].total())[:4]:
            size, _, change = verdict.removeprefix("no: ").partition(" is no multiple of 8; ")
            kinds = dict.fromkeys(map(pattern, flops))
            of = ", ".join(collapsed({path for path in flops if pattern(path) == kind}) for kind in kinds)
            lines.append(f"{size} in {of}: {change} ({percent(flops.total() / self.flops)} of the work)")
        return "; ".join(lines + [f"and {len(self.off) - 4} more sizes"] * (len(self.off) > 4))


@contextmanager
def _unobserved() -> Iterator[None]:
    with unwatched(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


# The report


def report(script: str, seen: Observer) -> tuple[list[str], bool]:
    """Return the lines to print, and whether they name a mistake."""
    models, optimizers = seen.models, list(seen.steps)
    mistakes = [*seen.standstill.lost_in_lower_precision(models), *seen.mistakes]
    sizes = [sum(param.numel() for param in known(model.parameters())) for model in models]
    names = ", ".join(f"{type(model).__name__} ({size:,} parameters)" for model, size in zip(models, sizes))
    steps = ", ".join(f"{count} steps of {type(x).__name__}" for x, count in seen.steps.items())
    ran = f"{steps or 'no optimizer stepped'}; {names or 'no model'}"
    lines = ["", f"{script}: {ran}; the script uses {seen.does}.", ""]
    levels = {level: explain(models, optimizers, opt_level=level) for level in OPT_LEVELS if level != "O0"}
    table = [("level", "weights", "optimizer step", "bytes per parameter", "loss scale")]
    if seen.as_it_is is not None:
        held = {param for x in optimizers for param in params_of(x)}
        trained = {param for model in models for param in model.parameters()}
        scale = "GradScaler" if seen.has_scaler else ""
        table.append(_row("as it is", seen.as_it_is, scale, is_known=not held.isdisjoint(trained)))  # no copies of them
    is_exact = bool(models) and all(x.dtype is torch.float64 for model in models for x in known(model.parameters()))
    if not is_exact:
        table += [_row(level, x, "dynamic" if level in ("O1", "O2") else "none") for level, x in levels.items()]
    if len(optimizers) == 1:
        table += _in_8_bits(models, optimizers[0])
    lines += columns(table)
    not_cast = [f"{reason} ({n}x)" for reason, n in seen.not_cast.most_common(4)]
    standing = [*seen.standstill.reasons(models), *_unregistered(seen)]
    none = "none seen" + ", but see what is not trained" * bool(standing)
    to_lower, to_float32 = (", ".join(f"{name} {n}x" for name, n in x.most_common(4)) for x in seen.casts.values())
    rows = [
        ("cast", f"to lower precision {to_lower or 'nothing'}; to float32 {to_float32 or 'nothing'}"),
        ("kept float32", f"at O2 {_kept(levels['O2'].modules)}"),
        ("not cast", "; ".join(not_cast) or "none"),
        *[("levels", "all but O0 refuse a model in float64: call model.float() first")] * is_exact,
        *(("gradients", words) for words in _wide_gradients(optimizers) if not is_exact),
        *(("not trained", reason) for reason in standing),
        ("shapes", seen.products.in_words() or "all multiples of 8, as matrix units of GPUs want them"),
        *(("mistake", mistake) for mistake in mistakes or [none]),
    ]
    return [*lines, "", *columns(rows)], bool(mistakes)


def _unregistered(seen: Observer) -> Iterator[str]:
    held = {param for optimizer in seen.steps for param in params_of(optimizer)}
    for module, site in seen.unregistered.items() if held else ():
        # A teacher has no gradients; a network that is only evaluated is in eval().
        has_gradients = any(param.grad is not None for param in module.parameters())
        if module.training and has_gradients and held.isdisjoint(module.parameters()):
            kind = type(module).__name__
            yield f"a {kind} that runs at {site}: no model has it as a part; nn.ModuleList keeps what a list hides"


def _row(name: str, explained: Explanation, scale: str, is_known: bool = True) -> tuple[str, ...]:
    weights = {x.storage: f"{short(x.storage)}{' + 16-bit rest' * x.has_rest}" for x in explained.modules}
    lower = [words for dtype, words in weights.items() if dtype in LOWER_PRECISION]
    lower += [words for words in weights.values() if torch.float32 not in weights]
    steps = [f"{x.kind}: {x.step}" + f" ({x.reason})" * x.step.startswith("over") for x in explained.optimizers]
    return (
        name,
        lower[0] if lower else "float32",
        "; ".join(steps) or "none",
        "; ".join(
            "?" if math.isnan(x.total_bytes) or not is_known else f"{x.total_bytes:.1f}" for x in explained.optimizers
        ),
        scale,
    )


def _wide_gradients(optimizers: Sequence[Any]) -> Iterator[str]:
    """Yield the reason why O5 may take as many bytes as O1: matrices that are too small for a gradient in lower precision."""
    trained = [param for optimizer in optimizers for param in known(params_of(optimizer)) if param.requires_grad]
    total = sum(param.numel() for param in trained)
    narrow = sum(param.numel() for param in trained if is_large(param, torch.float32))
    if library is None:
        yield "at O5 4 bytes: O1's compiled wrappers are missing ('ampkit info' says more)"
    elif narrow < 0.95 * total:
        yield f"at O5 2 bytes for {narrow / total:.0%} of the elements: for matrices with at least {LARGE:,} elements"


def _in_8_bits(models: Sequence[nn.Module], optimizer: Any) -> list[tuple[str, ...]]:
    """Return rows for ampkit's fused optimizer with 8-bit moments, at O5 and without a session; none if it has no equivalent."""
    dtypes = {param.dtype for param in params_of(optimizer)}
    if "int8" not in optimizers_for(optimizer) or not dtypes <= {torch.float32, torch.bfloat16}:
        return []
    optimizer_int8 = fused(optimizer, state_dtype="int8")
    words = f'{type(optimizer).__name__}(state_dtype="int8")'
    at_o5, alone = (
        _row(name, explain(models, optimizer_int8, opt_level=level), "none")
        for name, level in (("O5, int8", "O5"), ("no level", None))
    )
    weights = alone[1] + " + 16-bit rest" * (torch.bfloat16 in dtypes)
    return [(*at_o5[:2], words, *at_o5[3:]), (alone[0], weights, words, *alone[3:])]


def _kept(rows: Sequence[ModuleRow]) -> str:
    by_reason: dict[str, list[ModuleRow]] = {}
    for row in rows:
        if row.kept is not None:
            by_reason.setdefault(row.kept, []).append(row)
    parts = []
    for reason, alike in by_reason.items():
        first = ", ".join(row.name or "the model" for row in alike[:2]) + ", ..." * (len(alike) > 2)
        parts.append(f"{sum(row.modules for row in alike)}x {reason} ({first})")
    return "; ".join(parts) or "nothing"
