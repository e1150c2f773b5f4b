"""`explain`: the storage dtype of each module, what stays float32 and why, and how each optimizer steps.

`explain` reads a live session, or predicts what a level would do. It uses the core's own rules: `Kept` in models/,
`why_not_in_one_pass` in iteration/. ``print(session)`` and ``ampkit check`` call it. `recording` reports the dtypes of calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..casting.narrow_gradients import is_large, stored_gradient
from ..casting.tensors import params_of
from ..devices import device_type_of
from ..dtypes import CASTABLE, LOWER_PRECISION
from ..errors import ConfigurationError
from ..iteration.ways import Traits, choose, is_known, why_not_in_one_pass
from ..kernels.moments import packed_size
from ..logs import printable
from ..models.keep_fp32 import Kept
from ..plan import Plan, resolve
from ..registry import live_sessions, wrapper_of
from ..session import Session
from ..sharding import fsdp_modules
from .watching import tensors_in
from .words import collapsed, columns, pattern, short

#: The number of moments per parameter, by optimizer class and parameter group: before the first step no state can be measured.
_MOMENTS = {
    **dict.fromkeys(
        ("Adam", "AdamW", "NAdam", "RAdam", "FusedAdam", "FusedLAMB"), lambda group: 2 + bool(group.get("amsgrad"))
    ),
    **dict.fromkeys(("Adagrad", "FusedAdagrad"), lambda group: 1),
    **dict.fromkeys(("SGD", "FusedSGD"), lambda group: bool(group.get("momentum"))),
}


@dataclass(frozen=True)
class ModuleRow:
    """A row of an `Explanation`: modules, or parameters of a module, that are treated alike.

    ``name`` has ranges if equal modules are collapsed (``layers.0-11.attention.q``), ``kind`` is the class, ``modules`` their
    number and ``parameters`` the number of elements. ``storage`` is a dtype. ``has_rest`` says that 16 bits beside each weight
    complete its float32 value. ``kept`` is the reason why the module stays float32 at a level that lowers others; else None.
    """

    name: str
    kind: str
    modules: int
    parameters: int
    storage: torch.dtype
    has_rest: bool
    kept: str | None


@dataclass(frozen=True)
class OptimizerRow:
    """A row of an `Explanation`: an optimizer, and how it steps.

    ``masters`` says where float32 values of weights are. ``step`` is ``"one pass"``, ``"over float32 copies"`` or ``"its own"``,
    and ``reason`` says why. ``bytes_per_parameter`` has the bytes per element of weights, rests, gradients and state. State that
    does not exist yet and cannot be predicted is NaN.
    """

    kind: str
    parameters: int
    masters: str
    step: str
    reason: str
    bytes_per_parameter: dict[str, float]

    @property
    def total_bytes(self) -> float:
        return sum(self.bytes_per_parameter.values())


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`: ``modules`` and ``optimizers`` as rows, and both as tables by ``str``."""

    title: str
    modules: tuple[ModuleRow, ...]
    optimizers: tuple[OptimizerRow, ...]

    def __str__(self) -> str:
        rows = [("module", "number", "parameters", "stored in", "why float32")]
        for row in self.modules:
            named = row.name or "(the model)", f"{row.modules} {row.kind}", f"{row.parameters:,}"
            rows.append((*named, short(row.storage) + " + rest" * row.has_rest, row.kept or ""))
        lines = [self.title, *(["", *columns(rows, right=(2,))] if self.modules else ())]
        if self.optimizers:
            rows = [("optimizer", "parameters", "float32 values", "step", "bytes per parameter")]
            for x in self.optimizers:
                step = f"{x.step} ({x.reason})" if x.reason else x.step
                rows.append((x.kind, f"{x.parameters:,}", x.masters, step, _in_bytes(x)))
            lines += ["", *columns(rows, right=(1,))]
        return "\n".join(lines)


def explain(models: Any, optimizers: Any = None, opt_level: str | None = None, **settings: Any) -> Explanation:
    """Explain what a session has made of models and optimizers; or, with ``opt_level``, what `initialize` would make of them.

    ``models`` is an initialized model (or a list of them), or a `Session`. With ``opt_level`` and settings of `initialize`,
    ``models`` and ``optimizers`` are those that `initialize` would be given; nothing is touched. Without ``opt_level``, a model
    that was not initialized is shown as it is.

    >>> print(ampkit.explain(model, optimizer, opt_level="O2"))

    Raises `ConfigurationError` for settings that `initialize` refuses, and TypeError for what is no model.
    """
    if isinstance(models, Session):
        return _explanation(_title(models), models.plan, models.models, models.optimizers, is_live=True)
    models = list(models) if isinstance(models, (list, tuple)) else [models]
    for model in models:
        if not isinstance(model, nn.Module):
            raise TypeError(f"explain() was given a {type(model).__name__}; it expects a model, or a session.")
    opts = [] if optimizers is None else list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    if opt_level is not None:
        plan = resolve(opt_level, device_type_of(models), settings)
        return _explanation(f"{opt_level}, before initialize: {plan.in_words()}", plan, models, opts, is_live=False)
    if settings:
        raise ConfigurationError(f"explain({', '.join(settings)}=) needs opt_level=, for which the settings are.")
    parts = {module for model in models for module in model.modules()}
    for session in reversed(live_sessions):
        if session.plan.enabled and any(module in parts for model in session.models for module in model.modules()):
            return explain(session)
    return _explanation("No session: as the model is.", Plan(enabled=False), models, opts, is_live=True)


def _title(session: Session) -> str:
    if not session.is_live:
        return f"{session.plan.opt_level}: closed."
    if not session.plan.enabled:
        return "enabled=False: nothing is changed."
    scales = ", ".join(f"{scaler.loss_scale:g}" for scaler in session.scalers)
    return f"{session.plan.opt_level}: {session.plan.in_words()} (now {scales})"


def _explanation(
    title: str, plan: Plan, models: Sequence[nn.Module], optimizers: Sequence[Any], is_live: bool
) -> Explanation:
    treatment = Treatment(plan, models, optimizers, is_live)
    rows = tuple(_optimizer_row(optimizer, treatment) for optimizer in optimizers)
    return Explanation(title, tuple(_module_rows(models, treatment)), rows)


def known(params: Iterable[Tensor | None]) -> list[Tensor]:
    """Return the parameters that have a shape; those of a lazy module have none before its first call."""
    return [param for param in params if param is not None and not is_lazy(param)]


class Treatment:
    """The dtypes in which a plan stores parameters, and which have ``rests``; as they are if the session ``is_live``."""

    def __init__(self, plan: Plan, models: Sequence[nn.Module], optimizers: Sequence[Any], is_live: bool) -> None:
        self.plan, self.is_live = plan, is_live
        self._kept: dict[nn.Module, Kept] = {}
        for model in models if plan.enabled else ():
            self._kept.update(dict.fromkeys(model.modules(), Kept(model, plan, optimizers)))
        self._in_float32 = {module for kept in {*self._kept.values()} for module in kept.in_float32()}
        self._sharded = {module for model in models if fsdp_modules(model) for module in model.modules()}
        held = {param for optimizer in optimizers for param in params_of(optimizer)}
        stays = is_live or not plan.enabled
        casts_held_only = bool(optimizers) and plan.casts_calls and not plan.lowers_all
        self.stored: dict[Tensor, torch.dtype] = {}
        for module in (module for model in models for module in model.modules()):
            for param in known(module._parameters.values()):
                self.stored[param] = torch.float32  # parameters in lower precision are converted to float32
                if stays or param.dtype not in CASTABLE or (casts_held_only and param not in held):
                    self.stored[param] = param.dtype
                elif plan.casts_weights and self.why_kept(module, param) is None:
                    self.stored[param] = plan.cast_model_type or torch.float32
        trained = next((kept.trained for kept in self._kept.values()), None)
        has_rests = plan.enabled and plan.master_weights
        lower = {param for param, dtype in self.stored.items() if dtype in LOWER_PRECISION and has_rests}
        self.rests = lower if trained is None else lower & trained
        self.stored = {param: param.dtype for param in held} | self.stored

    def why_kept(self, module: nn.Module, param: nn.Parameter) -> str | None:
        """The reason why a parameter is not stored in lower precision; None if the plan stores it so, or gives no reason."""
        if not self.plan.enabled or not self.plan.casts_weights:
            return "keep_fp32= names it" if module in self._in_float32 else None
        if param.dtype not in CASTABLE:
            return f"{short(param.dtype)} is never cast"
        if module in self._sharded:
            return "FSDP2 shards it in float32 and gathers it in lower precision"
        return self._kept[module].why_kept(module, param)


def _module_rows(models: Sequence[nn.Module], treatment: Treatment) -> Iterator[ModuleRow]:
    """Yield rows of modules that differ only in numbers of their names, named by ranges: ``layers.0-11.attention.q``.

    A module whose parameters are treated differently is in several rows.
    """
    groups: dict[Any, dict[str, int]] = {}
    named = [(number, name, module) for number, model in enumerate(models) for name, module in model.named_modules()]
    for number, prefix, module in named:
        treated: dict[Any, dict[str, Tensor]] = {}
        for name, param in module._parameters.items():
            if known([param]):
                dtype = treatment.stored[param]
                why = treatment.why_kept(module, param) if dtype not in LOWER_PRECISION else None
                treated.setdefault((dtype, param in treatment.rests, why), {})[name] = param
        for treated_alike, params in treated.items():
            names = [prefix] * bool(prefix) + [", ".join(params)] * (len(treated) > 1)
            name = f"model {number}: " * (len(models) > 1) + printable(".".join(names))
            sizes = groups.setdefault((pattern(name), type(module).__name__, treated_alike), {})
            sizes[name] = sum(param.numel() for param in params.values())
    for (_, kind, treated_alike), sizes in groups.items():
        yield ModuleRow(collapsed({*sizes}), kind, len(sizes), sum(sizes.values()), *treated_alike)


def _optimizer_row(optimizer: Any, treatment: Treatment) -> OptimizerRow:
    plan, params = treatment.plan, list(dict.fromkeys(known(params_of(optimizer))))
    lowered = [param for param in params if treatment.stored[param] in LOWER_PRECISION]
    mastered = treatment.rests.intersection(lowered)
    step, reason = "its own", "weights are float32"
    has_rests = bool(lowered) and not mastered and getattr(optimizer, "rests", False)
    if has_rests:  # ampkit's fused optimizer, without a session
        step, reason = "one pass", ""
    elif lowered and not mastered:
        reason = "weights are in lower precision, without float32 values"
    elif mastered or plan.steps_in_one_pass:
        if treatment.is_live and (wrapper := wrapper_of(optimizer)) is not None:
            why = choose(wrapper)[1]
        else:
            why = why_not_in_one_pass(optimizer, Traits.of(optimizer), params, plan.one_pass_step)
        step, reason = ("one pass", "") if why is None else ("over float32 copies" if mastered else "its own", why)
    masters = "the weights"
    if lowered:
        masters = f"{short(treatment.stored[lowered[0]])} weight + 16-bit rest" if mastered or has_rests else "none"
    with_rests = {param for param in lowered if param.requires_grad} if has_rests else mastered
    number, each = sum(param.numel() for param in params), _bytes(optimizer, params, with_rests, treatment)
    return OptimizerRow(type(optimizer).__name__, number, masters, step, reason, bytes_per_parameter=each)


def _bytes(optimizer: Any, params: list[Tensor], with_rests: set[Tensor], treatment: Treatment) -> dict[str, float]:
    total = max(1, sum(param.numel() for param in params))
    # Whether gradients stay in the dtype of the weight: float16 cannot hold every unscaled gradient.
    in_place = {torch.bfloat16: True, torch.float16: treatment.plan.loss_scale == 1.0}
    sums: Any = Counter(weights=0, rests=0, gradients=0, state=0)
    for param in params:
        dtype, is_mastered = treatment.stored[param], param in treatment.rests
        sums["weights"] += param.numel() * dtype.itemsize
        sums["rests"] += param.numel() * 2 * (param in with_rests)
        gradient_dtype = torch.float32 if is_mastered and not in_place[dtype] else dtype
        if treatment.plan.has_narrow_gradients and is_large(param, dtype):
            gradient_dtype = treatment.plan.lower_precision
        if treatment.is_live and (gradient := stored_gradient(param)) is not None:
            gradient_dtype = gradient.dtype
        sums["gradients"] += param.numel() * gradient_dtype.itemsize * param.requires_grad
        # State has the dtype of the weights if these have no float32 values.
        keeps_float32 = is_mastered or getattr(optimizer, "keeps_float32_state", False)
        narrows = dtype in LOWER_PRECISION and not keeps_float32
        sums["state"] += _bytes_of_state(optimizer, param, dtype if narrows else torch.float32, treatment.is_live)
    return {name: size / total for name, size in sums.items()}


def _bytes_of_state(optimizer: Any, param: Tensor, dtype: torch.dtype, is_live: bool) -> float:
    """Measure the state, or predict it before the first step: moments in ``dtype``, or as the optimizer stores them."""
    storage = getattr(optimizer, "storage", None)
    is_narrow = storage is not None and storage.is_narrow and param.dtype in CASTABLE
    state = optimizer.state.get(param) if hasattr(optimizer, "state") else None
    if state:
        values = [value for name, value in state.items() if name != "rest"]  # counted under rests
        large = [x for x in tensors_in(values) if x.numel() > 1 or param.numel() == 1]
        dtypes = [x.dtype if is_live or is_narrow or x.dtype not in CASTABLE else dtype for x in large]
        return sum(x.numel() * state_dtype.itemsize for x, state_dtype in zip(large, dtypes))
    if not param.requires_grad:
        return 0.0
    group = next((group for group in optimizer.param_groups if any(x is param for x in group["params"])), {})
    kind = type(optimizer).__name__
    if kind not in _MOMENTS or not is_known(optimizer):
        return float("nan")
    moment_bytes = param.numel() * (storage.state_dtype if is_narrow else dtype).itemsize
    if is_narrow and storage.state_dtype is torch.uint8:
        moment_bytes = packed_size(param.numel())
    return float(moment_bytes * _MOMENTS[kind](group))


def _in_bytes(row: OptimizerRow) -> str:
    parts = [(name, number) for name, number in row.bytes_per_parameter.items() if number]
    words = [f"{name} after the first step" if number != number else f"{number:.1f} {name}" for name, number in parts]
    total = row.total_bytes
    return " + ".join(words) if total != total else f"{total:.1f} = {' + '.join(words)}"
