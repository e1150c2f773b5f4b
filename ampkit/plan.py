"""The settings of a session, resolved: an opt level's defaults, the caller's overrides, and every check on them.

`resolve` is the one place that decides whether settings make sense together. Its result is frozen and printable;
if it raises, nothing has been changed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, NamedTuple, get_type_hints

import torch

from .dtypes import LOWER_PRECISION
from .errors import ConfigurationError
from .iteration.loss_scale import DEFAULT_MAX_LOSS_SCALE, DEFAULT_MIN_LOSS_SCALE, DynamicLossScale, is_positive
from .policy import Policy

LOWER_PRECISION_VARIABLE = "AMPKIT_LOWER_PRECISION"


class _Setting(NamedTuple):
    """A setting: ``take`` returns the plan's value for an accepted value, and `_REFUSED` for any other."""

    take: Callable[[Any], Any]
    expected: str = ""
    advice: str = ""


_REFUSED = object()


def _expect(accepts: Callable[[Any], bool], expected: str) -> _Setting:
    """A setting whose accepted values go into the plan unchanged."""
    return _Setting(lambda value: value if accepts(value) else _REFUSED, expected)


def _any_of(accepted: tuple[Any, ...]) -> str:
    """The accepted values in words: ``a``, ``a or b``, ``a, b or c``."""
    *before_last, last = (repr(value) if isinstance(value, str) else str(value) for value in accepted)
    return f"{', '.join(before_last)} or {last}" if before_last else last


def _word(*words: str) -> _Setting:
    return _expect(lambda value: isinstance(value, str) and value in words, _any_of(words))


def _integer(least: int) -> _Setting:
    return _expect(lambda value: type(value) is int and value >= least, f"an integer of at least {least}")


def _take_loss_scale(value: Any) -> Any:
    if isinstance(value, DynamicLossScale) or value == "dynamic":
        return DynamicLossScale() if value == "dynamic" else value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return _REFUSED
    return number if is_positive(number) and not isinstance(value, bool) else _REFUSED


def _take_keep_fp32(value: Any) -> Any:
    kinds = (str, type, torch.nn.Module)
    items = tuple(value) if isinstance(value, Iterable) and not isinstance(value, kinds) else (value,)
    return items if all(isinstance(item, kinds) for item in items) else _REFUSED


_BOOL = _expect(lambda value: isinstance(value, bool), "True or False")
_BOOL_OR_ITS_NAME = _BOOL._replace(take=lambda value: _BOOL.take({"True": True, "False": False}.get(str(value), value)))
_ENABLED = _BOOL._replace(advice="The third argument of initialize() is enabled; name the level, as in opt_level='O2'.")
_KEEP_FP32 = _Setting(_take_keep_fp32, "modules, module types or name patterns")
_FLOATING = _expect(
    lambda value: isinstance(value, torch.dtype) and value.is_floating_point, "a floating-point torch.dtype"
)
_LOSS_SCALE = _Setting(
    _take_loss_scale, "'dynamic', a DynamicLossScale or a positive number", "1.0 means no loss scaling."
)
_BOUND = _Setting(
    lambda value: float(value) if is_positive(value) else _REFUSED,
    "a positive, finite number",
    "Sums over a batch may need scales below 1; 0 is no scale.",
)
_SCOPE = _word("process", "forward")._replace(
    advice="'process' casts every call of torch, 'forward' those inside of the initialized models' forwards."
)


@dataclass(frozen=True, repr=False)
class Plan:
    """The settings of a session, with every default filled in; each is checked as its row says."""

    opt_level: str = "O1"
    enabled: Annotated[bool, _ENABLED] = True
    cast_model_type: Annotated[torch.dtype | None, _Setting(lambda value: None if value is False else value)] = None
    patch_torch_functions: Annotated[bool, _BOOL] = False
    patch_torch_functions_type: Annotated[torch.dtype | None, _Setting(lambda value: value)] = None
    keep_batchnorm_fp32: Annotated[bool | None, _BOOL_OR_ITS_NAME] = None
    master_weights: Annotated[bool, _BOOL] = False
    loss_scale: Annotated[float | DynamicLossScale, _LOSS_SCALE] = 1.0
    cast_model_outputs: Annotated[torch.dtype | None, _FLOATING] = None
    num_losses: Annotated[int, _integer(1)] = 1
    verbosity: Annotated[int, _integer(0)] = 1
    min_loss_scale: Annotated[float, _BOUND] = DEFAULT_MIN_LOSS_SCALE
    max_loss_scale: Annotated[float, _BOUND] = DEFAULT_MAX_LOSS_SCALE
    keep_fp32: Annotated[tuple[Any, ...], _KEEP_FP32] = ()
    policy: Annotated[Policy, _Setting(Policy.of)] = field(default_factory=Policy)
    on_floor: Annotated[str, _word("raise", "warn")] = "raise"
    one_pass_step: Annotated[bool, _BOOL] = True
    check_gradients: Annotated[bool | None, _BOOL] = None
    scope: Annotated[str, _SCOPE] = "process"
    lower_precision_weights: Annotated[str, _word("float32", "keep", "refuse")] = "float32"

    @functools.cached_property
    def casts_weights(self) -> bool:
        """Whether model weights are held in lower precision."""
        return self.cast_model_type in LOWER_PRECISION

    @functools.cached_property
    def stores_weights(self) -> bool:
        """Whether weights may be held in lower precision: by this plan, or as they came, beside float32 values."""
        return self.casts_weights or self.master_weights

    @functools.cached_property
    def casts_calls(self) -> bool:
        """Whether calls of torch are cast by the tables."""
        return self.patch_torch_functions_type is not None or self.casts_weights

    @functools.cached_property
    def has_narrow_results(self) -> bool:
        """Whether calls are cast inside the models alone, where softmax, norms and pow return the precision of their input."""
        return self.casts_calls and not self.patch_torch_functions

    @functools.cached_property
    def has_narrow_gradients(self) -> bool:
        """Whether the gradient of a large float32 weight is in lower precision until a script reads it."""
        return self.has_narrow_results and not self.casts_weights and self.loss_scale == 1.0

    @functools.cached_property
    def steps_in_one_pass(self) -> bool:
        """Whether torch's optimizers update float32 weights in one pass, which a device can skip without a wait of the host."""
        return self.casts_calls and not self.casts_weights and self.one_pass_step

    @property
    def lower_precision(self) -> torch.dtype | None:
        """The dtype that calls are cast to, or None."""
        return self.patch_torch_functions_type or self.cast_model_type

    @functools.cached_property
    def lowers_all(self) -> bool:
        """Whether inputs are cast, and all parameters but norms are stored in lower precision, not only matrices: as Apex did."""
        return self.casts_weights and (not self.master_weights or self.policy.base == "apex")

    @property
    def has_dynamic_loss_scale(self) -> bool:
        return isinstance(self.loss_scale, DynamicLossScale)

    def __repr__(self) -> str:
        changes = self.changes_of(Plan(opt_level=self.opt_level))
        return f"Plan(opt_level={self.opt_level!r}{', ' if changes else ''}{changes})"

    def in_words(self) -> str:
        """The precisions of calls and weights, in a line."""
        patched, words = self.patch_torch_functions, []
        if self.patch_torch_functions_type is not None:
            where = "" if patched and self.scope == "process" else ", inside the models' forward"
            words.append(f"torch functions cast to {_short(self.patch_torch_functions_type)} by their tables{where}")
        words.append(f"weights {_short(self.cast_model_type) if self.casts_weights else 'float32'}")
        if self.casts_weights:
            words.append(f"norms {'float32' if self.keep_batchnorm_fp32 else _short(self.cast_model_type)}")
        if self.master_weights:
            words.append("master weights float32, as weight and 16-bit rest")
        words.append(f"loss scale {'dynamic' if self.has_dynamic_loss_scale else f'{self.loss_scale:g}'}")
        return ", ".join(words)

    def changes_of(self, defaults: Plan) -> str:
        """The settings that differ from ``defaults``, written as arguments of `initialize`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        changed = {name: value for name, value in values.items() if value != getattr(defaults, name)}
        return ", ".join(f"{name}={_as_written(value)}" for name, value in changed.items())


#: Every setting but the level itself.
SETTINGS = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(Plan, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _as_written(value: Any) -> str:
    """A setting on one line; a module by its class, since its repr takes many lines."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_as_written, value))}]"
    if isinstance(value, torch.nn.Module):
        return f"<{type(value).__name__}>"
    return value.__qualname__ if isinstance(value, type) else " ".join(repr(value).split())


class OptLevel(NamedTuple):
    """A row of the table of opt levels: the settings that differ from the defaults of `Plan`."""

    brief: str
    settings: dict[str, Any]


#: A placeholder in the table for the default lower precision of the device type.
LOWER = object()

_SCALED = dict(loss_scale=DynamicLossScale())
OPT_LEVELS = {
    "O0": OptLevel("O0: pure float32 training, the baseline", dict(cast_model_type=torch.float32)),
    "O1": OptLevel(
        "O1: casts around torch functions, float32 weights",
        dict(patch_torch_functions_type=LOWER, patch_torch_functions=True, **_SCALED),
    ),
    "O2": OptLevel(
        "O2: lower-precision model with float32 norms and master weights",
        dict(cast_model_type=LOWER, keep_batchnorm_fp32=True, master_weights=True, **_SCALED),
    ),
    "O3": OptLevel("O3: pure lower-precision training", dict(cast_model_type=LOWER, keep_batchnorm_fp32=False)),
    "O4": OptLevel(
        "O4: casts around torch functions to bfloat16, float32 weights, no loss scale",
        dict(patch_torch_functions_type=torch.bfloat16, patch_torch_functions=True),
    ),
    "O5": OptLevel(
        "O5: casts inside of the models to bfloat16, float32 weights, gradients of large weights in bfloat16, no loss scale",
        dict(patch_torch_functions_type=torch.bfloat16),
    ),
}


def resolve(opt_level: str, device_type: str, overrides: Mapping[str, Any]) -> Plan:
    """The `Plan` of an opt level on a device type (``"cpu"``, ``"cuda"``, ...) with the caller's overrides.

    An override that is None stands for the level's default. Raises `ConfigurationError`, naming what was found and what
    would be accepted, for settings that are wrong or that contradict their level.
    """
    plan = defaults_of(opt_level, device_type)
    values = {name: value for name, value in overrides.items() if value is not None}
    unknown = values.keys() - SETTINGS.keys()
    if unknown:
        raise ConfigurationError(f"Unknown settings {sorted(unknown)}; known are {list(SETTINGS)}.")
    checked = {name: _checked(name, value, opt_level) for name, value in values.items()}
    plan = replace(plan, **checked)
    plan = replace(plan, policy=plan.policy.for_device(device_type))
    if plan.max_loss_scale < plan.min_loss_scale:
        raise ConfigurationError(
            f"min_loss_scale={plan.min_loss_scale:g} is above max_loss_scale={plan.max_loss_scale:g}. Lower the one or raise "
            "the other."
        )
    return plan


def defaults_of(opt_level: str, device_type: str) -> Plan:
    """The plan of an opt level without overrides."""
    level = OPT_LEVELS.get(opt_level) if isinstance(opt_level, str) else None
    if level is None:
        raise ConfigurationError(
            f"Unexpected opt_level {opt_level!r}. Choose one of {', '.join(map(repr, OPT_LEVELS))} (a capital letter O and a "
            "digit, not two digits). 'O4' and 'O5' are bfloat16 everywhere, 'O1' and 'O2' float16 on GPUs."
        )
    settings: dict[str, Any] = {
        name: default_lower_precision(device_type) if value is LOWER else value
        for name, value in level.settings.items()
    }
    return Plan(opt_level=opt_level, **settings)


def default_lower_precision(device_type: str) -> torch.dtype:
    """The default dtype: float16 on accelerators and bfloat16 on the CPU, unless ``AMPKIT_LOWER_PRECISION`` names one.

    float16 arithmetic on CPUs is emulated and 13 to 80 times slower than bfloat16.
    """
    chosen = os.environ.get(LOWER_PRECISION_VARIABLE)
    if chosen is None:
        return torch.bfloat16 if device_type == "cpu" else torch.float16
    named = {str(dtype).removeprefix("torch."): dtype for dtype in LOWER_PRECISION}
    if chosen not in named:
        raise ConfigurationError(f"{LOWER_PRECISION_VARIABLE}={chosen!r} is none of {', '.join(named)}.")
    return named[chosen]


_EITHER = "O2 and O3 take either lower precision."
_AS_BEFORE = (
    "Weights that are stored in bfloat16, with their float32 values beside them, are "
    "opt_level='O2', cast_model_type=torch.bfloat16, loss_scale=1.0."
)
#: By setting and levels: the values that the setting takes there only, and advice. Where None is among them, all mean None.
_AT_LEVELS: dict[tuple[str, str], tuple[tuple[Any, ...], str]] = {
    ("cast_model_type", "O1 O4 O5"): (
        (None, torch.float32),
        f"Leave it out: weights stay float32 there. To cast the model choose O2 or O3. {_AS_BEFORE}",
    ),
    ("cast_model_type", "O0"): ((torch.float32,), _EITHER),
    ("cast_model_type", "O2 O3"): ((*LOWER_PRECISION, torch.float32), _EITHER),
    ("patch_torch_functions", "O0 O2 O3 O5"): (
        (False,),
        "Choose opt_level='O1' or opt_level='O4' to patch them; O5 casts inside of the models alone.",
    ),
    ("patch_torch_functions_type", "O1"): (LOWER_PRECISION, ""),
    ("patch_torch_functions_type", "O4 O5"): ((torch.bfloat16,), ""),
    ("patch_torch_functions_type", "O0 O2 O3"): ((None,), "It belongs to O1; O2 and O3 take cast_model_type=."),
    ("keep_batchnorm_fp32", "O1 O4 O5"): (
        (None,),
        "At {level} the weights, norms included, are float32 and the tables decide how norms compute.",
    ),
    ("master_weights", "O1 O4 O5"): ((None,), f"The weights are float32 there and are their own masters. {_AS_BEFORE}"),
    ("scope", "O0 O2 O3"): (("process",), "'forward' is about casts of calls alone. Use O1 or O4."),
}


def _checked(name: str, value: Any, level: str) -> Any:
    """Return the plan's value for the caller's, or raise `ConfigurationError`."""
    setting = SETTINGS[name]
    taken, expected, advice = setting.take(value), setting.expected, setting.advice
    for (limited, levels), (accepted, advice_there) in _AT_LEVELS.items():
        if name == limited and level in levels and taken is not None and taken is not _REFUSED:
            if taken in [x for x in accepted if type(x) is type(taken)]:
                return None if None in accepted else taken
            expected, advice = f"{_any_of(accepted)} at {level}", advice_there.format(level=level)
            taken = _REFUSED
    if taken is _REFUSED:
        raise ConfigurationError(
            f"{name}={value!r} is not accepted: expected {expected}.{' ' + advice if advice else ''}"
        )
    return taken
