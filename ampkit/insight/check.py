"""``ampkit check``: the first iterations of a script, and what each level would change in it.

The script is not edited, and may use float32, torch.autocast, ampkit or Apex. `Observer` notes the models and optimizers that run
and the functions of torch that they call; `report` asks `explain` what each level makes of them. The script ends after some steps
of its optimizers, and torch is as it was.
"""

from __future__ import annotations

import argparse
import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

from ..apex import running
from ..casting.tensors import params_of
from ..dtypes import LOWER_PRECISION
from ..events import Listener, forwards, listening, steps
from ..iteration.advice import calls_of_torch
from ..logs import is_rank_zero, logger
from ..patching import PatchSet, Undo
from ..plan import OPT_LEVELS
from ..policy import CastKind, Policy
from ..registry import current_session
from .explain import ModuleRow, OptimizerRow, columns, explain, short

EXAMPLE = "ampkit check --iterations 2 --device cpu tests/apex/scripts/classify.py --opt-level O1"
#: A script whose optimizers do not step ends after this many forward or backward passes for each iteration that was asked for.
_PASSES = 50
_TENSOR_CORE = 8
_LEAST_SIZE = 64  # smaller matrices take no time
_WRAPPERS = ("DistributedDataParallel", "DataParallel", "OptimizedModule")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``--iterations``, and what ``ampkit run`` takes."""
    parser.add_argument(
        "--iterations", type=int, default=3, metavar="N", help="end the script after N steps of each optimizer (3)"
    )
    running.add_arguments(parser)


def from_command_line(arguments: argparse.Namespace) -> int:
    """Run the script's first iterations and print the report. The exit code is 1 where it names a mistake, else 0.

    Exceptions of the script pass through, and then there is no report.
    """
    if arguments.iterations < 1:
        print(
            f"ampkit check: --iterations {arguments.iterations} is not accepted: expected at least 1.", file=sys.stderr
        )
        return 2
    observer, hook = Observer(arguments.iterations), sys.excepthook
    try:
        with observer.watching():
            code = running.from_command_line(arguments)
        if code != 0:
            return code
    except _Enough:
        sys.excepthook = hook
    except SystemExit as exited:
        if exited.code not in (None, 0):
            raise
    lines, has_mistakes = report(arguments.target, observer)
    if is_rank_zero():
        print("\n".join(lines))
    return int(has_mistakes)


class _Enough(BaseException):
    """Raised through the script where enough was seen."""


class Observer(logging.Handler, Listener):
    """What a script did while `watching`, for ``iterations`` steps. Warnings of ampkit count among its ``mistakes``."""

    def __init__(self, iterations: int) -> None:
        super().__init__(logging.WARNING)
        self.iterations = iterations
        self.steps: dict[Any, int] = {}  # by optimizer
        self.backward_passes = self.forward_passes = 0
        self.roots: dict[nn.Module, None] = {}  # modules that the script itself calls
        self.rows: dict[int, str] = {}  # of products in a Linear: their number, and the layer
        self.casts: dict[CastKind, Counter[str]] = {CastKind.LOWER_PRECISION_FP: Counter(), CastKind.FP32: Counter()}
        self.not_cast: Counter[str] = Counter()
        self.mistakes: dict[str, None] = {}
        self.does = "float32"  # what the script itself does about precision
        self._enough = False
        self._here = threading.local()
        self._rules = {getattr(rule.owner, rule.name): rule for rule in Policy().rules()[0]}
        self._autocast_off = 0
        self._is_scaled = self._has_scaler = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        patches = PatchSet()
        with Undo() as undo:
            undo.enter_context(listening(self, forwards, steps, calls_of_torch))
            undo.callback(patches.restore)
            for owner, name, method in (
                (torch.autocast, "__enter__", self._enter_autocast),
                (torch.autocast, "__exit__", self._exit_autocast),
                (torch.amp.grad_scaler.GradScaler, "scale", self._scale),
                (torch.amp.grad_scaler.GradScaler, "_unscale_grads_", self._unscale),
                (sys.modules["torch.nn.utils.clip_grad"], "_clip_grads_with_norm_", self._clip),
            ):
                patches.set(owner, name, method(getattr(owner, name)))
            logger.addHandler(self)
            undo.callback(logger.removeHandler, self)
            undo.enter_context(torch.compiler.set_stance("force_eager"))
            with _Calls(self):
                yield

    @property
    def models(self) -> list[nn.Module]:
        """The modules with parameters that the script called, without their wrappers and without parts of one another."""
        found = []
        for model in self.roots:
            while type(model).__name__ in _WRAPPERS:
                model = next(iter(model.children()))
            if next(model.parameters(), None) is not None and model not in found:
                found.append(model)
        return [one for one in found if not any(one is not other and one in other.modules() for other in found)]

    # The end

    def _end_if_enough(self) -> None:
        if self._enough:
            raise _Enough

    def step_begins(self, _: Any) -> None:
        self._end_if_enough()

    def step_ends(self, optimizer: Any, skipped: bool) -> None:
        self.steps[optimizer] = self.steps.get(optimizer, 0) + 1
        self._is_scaled = False
        # One that steps less often than another is not waited for.
        counts = self.steps.values()
        self._enough = min(counts) >= self.iterations or max(counts) >= 2 * self.iterations
        if (session := current_session()) is not None and session.plan.enabled:
            self.does = f"ampkit at {session.plan.opt_level}"
        elif self.does == "float32" or self.does.startswith("weights"):
            lower = {param.dtype for param in params_of(optimizer)}.intersection(LOWER_PRECISION)
            for dtype in lower:
                self.does = f"weights in {short(dtype)}"
                self._note(
                    f"{type(optimizer).__name__} updates weights in {short(dtype)}, which rounds small updates away: O5 and O2 "
                    "train them in float32"
                )
        if self.does == "torch.autocast in float16" and not self._has_scaler:
            self._note(
                "torch.autocast in float16 without a GradScaler: small gradients underflow to 0; O1 and O2 scale the loss"
            )

    def _pass(self, count: int) -> None:
        self._enough = self._enough or count >= _PASSES * self.iterations

    # What runs

    @property
    def depth(self) -> int:
        """How many forwards of modules are open in this thread."""
        return getattr(self._here, "depth", 0)

    def forward_begins(self, module: nn.Module, args: Any) -> None:
        if self.depth == 0 and not isinstance(module, torch.jit.ScriptModule):
            self._end_if_enough()
            self.roots.setdefault(module)
            self.forward_passes += next(module.parameters(), None) is not None
            if not self.backward_passes:
                self._pass(self.forward_passes)
        self._here.depth = self.depth + 1
        if isinstance(module, nn.Linear) and args and isinstance(args[0], Tensor):
            rows = args[0].numel() // max(1, args[0].shape[-1])
            self.rows.setdefault(rows, f"Linear({module.in_features}, {module.out_features})")

    def forward_ends(self, _: nn.Module) -> None:
        self._here.depth = max(0, self.depth - 1)

    def note_call(self, function: Any, args: Sequence[Any]) -> None:
        rule = self._rules.get(function)
        if rule is None or rule.kind not in self.casts:
            return
        dtypes = {one.dtype for one in args if isinstance(one, Tensor)}
        if torch.float64 in dtypes or any(dtype.is_complex for dtype in dtypes):
            self.not_cast[f"{rule.name} of float64 or complex tensors"] += 1
            return
        self.casts[rule.kind][rule.name] += 1
        if rule.kind is not CastKind.LOWER_PRECISION_FP:
            return
        if self._autocast_off:
            self.not_cast[f"{rule.name} inside torch.autocast(enabled=False)"] += 1
        elif self.depth == 0:
            self.not_cast[f"at O2, O3 and O5 {rule.name} outside of every module's forward"] += 1

    # Mistakes

    def emit(self, record: logging.LogRecord) -> None:
        self._note(record.getMessage())

    def _note(self, mistake: str) -> None:
        self.mistakes.setdefault(mistake)

    def backward_begins(self, _: Sequence[Any]) -> None:
        self._end_if_enough()
        self.backward_passes += 1
        self._pass(self.backward_passes)

    def _enter_autocast(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def enter(region: Any) -> Any:
            if current_session() is None:
                self._autocast_off += not region._enabled
                if region._enabled:
                    self.does = f"torch.autocast in {short(region.fast_dtype)}"
            return original(region)

        return enter

    def _exit_autocast(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def leave(region: Any, *error: Any) -> Any:
            if current_session() is None:
                self._autocast_off = max(0, self._autocast_off - (not region._enabled))
            return original(region, *error)

        return leave

    def _scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scale(grad_scaler: Any, *args: Any, **kwargs: Any) -> Any:
            self._has_scaler = self._is_scaled = grad_scaler.is_enabled()
            return original(grad_scaler, *args, **kwargs)

        return scale

    def _unscale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def unscale(*args: Any, **kwargs: Any) -> Any:
            self._is_scaled = False
            return original(*args, **kwargs)

        return unscale

    def _clip(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clip(*args: Any, **kwargs: Any) -> Any:
            if self._is_scaled and current_session() is None:
                self._note(
                    "clip_grad_norm_ before GradScaler.unscale_: it clips by a norm that is multiplied by the loss scale"
                )
            return original(*args, **kwargs)

        return clip


class _Calls(TorchFunctionMode):
    """Tells an `Observer` of each function of torch that the script, or a module, calls."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._observer.note_call(function, args)
        return function(*args, **(kwargs or {}))


# The report


def report(script: str, seen: Observer) -> tuple[list[str], bool]:
    """The lines to print, and whether they name a mistake."""
    models, optimizers = seen.models, list(seen.steps)
    names = ", ".join(f"{_plain(model)} ({_count(model):,} parameters)" for model in models) or "no model"
    steps = ", ".join(f"{count} steps of {type(one).__name__}" for one, count in seen.steps.items())
    lines = ["", f"{script}: {steps or 'no optimizer stepped'}; {names}; the script uses {seen.does}.", ""]
    levels = {level: explain(models, optimizers, opt_level=level) for level in OPT_LEVELS if level != "O0"}
    table = [("level", "weights", "optimizer step", "bytes per parameter", "loss scale")]
    for level, explained in levels.items():
        weights = {one.storage: f"{short(one.storage)}{' + 16-bit rest' * one.has_rest}" for one in explained.modules}
        lower = [words for dtype, words in weights.items() if dtype in LOWER_PRECISION]
        table.append(
            (
                level,
                lower[0] if lower else "float32",
                "; ".join(map(_step, explained.optimizers)) or "none",
                "; ".join(
                    f"{one.total_bytes:.1f}" if one.total_bytes == one.total_bytes else "?"
                    for one in explained.optimizers
                ),
                "dynamic" if level in ("O1", "O2") else "none",
            )
        )
    lines += columns(table)
    lower_calls, float32_calls = seen.casts.values()
    rows = [
        ("cast", f"to lower precision {_most(lower_calls)}; to float32 {_most(float32_calls)}"),
        ("kept float32", f"at O2 {_kept(levels['O2'].modules)}"),
        (
            "not cast",
            "; ".join([*(f"{what} ({n}x)" for what, n in seen.not_cast.most_common(4)), *_scripted(models)]) or "none",
        ),
        (
            "shapes",
            "; ".join(_shapes(models, seen.rows))
            or f"all multiples of {_TENSOR_CORE}, as matrix units of GPUs want them",
        ),
        *(("mistake", mistake) for mistake in seen.mistakes or ["none seen"]),
    ]
    return [*lines, "", *columns(rows)], bool(seen.mistakes)


def _plain(model: nn.Module) -> str:
    return type(model).__name__


def _count(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def _step(row: OptimizerRow) -> str:
    reason = f" ({row.reason})" if row.step.startswith("over") else ""
    return f"{row.kind}: {row.step}{reason}"


def _most(calls: Counter[str]) -> str:
    """The functions that were called most, with how often."""
    shown = ", ".join(f"{name} {count}x" for name, count in calls.most_common(4))
    return f"{shown}{', ...' * (len(calls) > 4)}" or "nothing"


def _kept(rows: Sequence[ModuleRow]) -> str:
    """What stays float32, by its reason, with the first names."""
    by_reason: dict[str, list[ModuleRow]] = {}
    for row in rows:
        if row.kept is not None:
            by_reason.setdefault(row.kept, []).append(row)
    parts = []
    for reason, own in by_reason.items():
        first = ", ".join(row.name or "the model" for row in own[:2]) + ", ..." * (len(own) > 2)
        parts.append(f"{sum(row.modules for row in own)}x {reason} ({first})")
    return "; ".join(parts) or "nothing"


def _scripted(models: Sequence[nn.Module]) -> list[str]:
    found = [name for model in models for name, one in model.named_modules() if isinstance(one, torch.jit.ScriptModule)]
    return [f"{found[0] or 'the model'} is TorchScript, which torch.autocast casts by its own lists"] if found else []


def _shapes(models: Sequence[nn.Module], rows: dict[int, str]) -> list[str]:
    """Sizes of matrices off multiples of 8, with which matrix units of GPUs are slow, and what to pad them to."""
    found: Counter[str] = Counter()
    for model in models:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                sizes = (module.in_features, module.out_features)
            elif isinstance(module, _ConvNd):
                sizes = (module.in_channels, module.out_channels)
            else:
                continue
            off = [size for size in sizes if size >= _LEAST_SIZE and size % _TENSOR_CORE]
            if off:
                kind = next(one.__name__ for one in type(module).__mro__ if one.__module__.startswith("torch.nn"))
                found[f"{kind}({sizes[0]}, {sizes[1]}): pad {_padded(off)}"] += 1
    batches = [(n, layer) for n, layer in rows.items() if n >= _LEAST_SIZE and n % _TENSOR_CORE]
    lines = [f"{text}{f' ({count} layers)' * (count > 1)}" for text, count in found.most_common(3)]
    return lines + [f"{n} rows enter {layer}: pad {_padded([n])}" for n, layer in batches[:1]]


def _padded(sizes: Sequence[int]) -> str:
    return ", ".join(f"{size} to {-(-size // _TENSOR_CORE) * _TENSOR_CORE}" for size in dict.fromkeys(sizes))
