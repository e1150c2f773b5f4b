"""The settings of a session, resolved: an opt level's defaults, the caller's overrides, and every check on them.

`resolve` is the one place that decides whether settings make sense together. What it returns is frozen and printable;
nothing has been touched when it raises.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch

from .dtypes import LOWER_PRECISION
from .errors import ConfigurationError
from .iteration.loss_scale import DEFAULT_MAX_LOSS_SCALE, DEFAULT_MIN_LOSS_SCALE, DynamicLossScale
from .policy import Policy

LOWER_PRECISION_VARIABLE = "AMPKIT_LOWER_PRECISION"


@dataclass(frozen=True)
class Plan:
    """What a session will do."""

    enabled: bool = True
    opt_level: str = "O1"
    cast_model_type: torch.dtype | None = None
    patch_torch_functions: bool = False
    patch_torch_functions_type: torch.dtype | None = None
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool = False
    loss_scale: float | DynamicLossScale = 1.0
    cast_model_outputs: torch.dtype | None = None
    num_losses: int = 1
    verbosity: int = 1
    min_loss_scale: float = DEFAULT_MIN_LOSS_SCALE
    max_loss_scale: float = DEFAULT_MAX_LOSS_SCALE
    keep_fp32: tuple[Any, ...] = ()
    policy: Policy = field(default_factory=Policy)
    on_floor: str = "raise"
    one_pass_step: bool = True
    check_gradients: bool | None = None
    scope: str = "process"
    lower_precision_weights: str = "float32"

    @property
    def casts_weights(self) -> bool:
        """Whether model weights are held in lower precision."""
        return self.cast_model_type in LOWER_PRECISION

    @property
    def casts_calls(self) -> bool:
        """Whether calls of torch are cast by the tables."""
        return self.patch_torch_functions or self.casts_weights

    @property
    def lower_precision(self) -> torch.dtype | None:
        """What calls are cast to, or None."""
        return self.patch_torch_functions_type if self.patch_torch_functions else self.cast_model_type

    @property
    def lowers_all(self) -> bool:
        """Whether inputs are cast, and all parameters but norms are stored in lower precision, not only matrices: as Apex did."""
        return self.casts_weights and (not self.master_weights or self.policy.base == "apex")

    @property
    def has_dynamic_loss_scale(self) -> bool:
        return isinstance(self.loss_scale, DynamicLossScale)

    def in_words(self) -> str:
        """What is computed and kept in which precision, in a line."""
        patched, words = self.patch_torch_functions, []
        if patched:
            where = ", inside the models' forward" if self.scope == "forward" else ""
            words.append(f"torch functions cast to {_short(self.patch_torch_functions_type)} by their tables{where}")
        words.append(f"weights {_short(self.cast_model_type) if self.casts_weights else 'float32'}")
        if self.casts_weights:
            words.append(f"norms {'float32' if self.keep_batchnorm_fp32 else _short(self.cast_model_type)}")
        if self.master_weights:
            words.append("master weights float32")
        words.append(f"loss scale {'dynamic' if self.has_dynamic_loss_scale else f'{self.loss_scale:g}'}")
        return ", ".join(words)

    def changes_of(self, defaults: Plan) -> str:
        """The settings that differ from ``defaults``, as one would write them to `initialize`."""
        return ", ".join(
            f"{one.name}={_as_written(getattr(self, one.name))}"
            for one in fields(self)
            if getattr(self, one.name) != getattr(defaults, one.name)
        )


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _as_written(value: Any) -> str:
    """A setting on one line: a module by its class, since its own words take many."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_as_written, value))}]"
    if isinstance(value, torch.nn.Module):
        return f"<{type(value).__name__}>"
    return value.__qualname__ if isinstance(value, type) else " ".join(repr(value).split())


class OptLevel(NamedTuple):
    """One row of the table of opt levels: what differs from the defaults of `Plan`."""

    brief: str
    settings: dict[str, Any]


#: Stands in the table for the lower precision of the device at hand.
LOWER = object()

_PATCHED = dict(patch_torch_functions=True)
_WITH_MASTERS = dict(keep_batchnorm_fp32=True, master_weights=True)
_SCALED = dict(loss_scale=DynamicLossScale())

OPT_LEVELS = {
    "O0": OptLevel("O0: pure float32 training, the baseline", dict(cast_model_type=torch.float32)),
    "O1": OptLevel(
        "O1: casts around torch functions, float32 weights",
        dict(patch_torch_functions_type=LOWER, **_PATCHED, **_SCALED),
    ),
    "O2": OptLevel(
        "O2: lower-precision model with float32 norms and master weights",
        dict(cast_model_type=LOWER, **_WITH_MASTERS, **_SCALED),
    ),
    "O3": OptLevel("O3: pure lower-precision training", dict(cast_model_type=LOWER, keep_batchnorm_fp32=False)),
    "O4": OptLevel(
        "O4: casts around torch functions to bfloat16, float32 weights, no loss scale",
        dict(patch_torch_functions_type=torch.bfloat16, **_PATCHED),
    ),
    "O5": OptLevel(
        "O5: bfloat16 model with float32 norms and master weights, no loss scale",
        dict(cast_model_type=torch.bfloat16, **_WITH_MASTERS),
    ),
}


def resolve(opt_level: str, device_type: str, overrides: Mapping[str, Any]) -> Plan:
    """The `Plan` of an opt level on a device type (``"cpu"``, ``"cuda"``, ...) with the caller's overrides.

    An override that is None stands for the level's default. Raises `ConfigurationError`, naming what was found and what
    would be accepted, for settings that are wrong or that contradict their level.
    """
    plan = defaults_of(opt_level, device_type)
    given = {name: value for name, value in overrides.items() if value is not None}
    unknown = given.keys() - SETTINGS.keys()
    if unknown:
        raise ConfigurationError(f"Unknown settings {sorted(unknown)}; known are {list(SETTINGS)}.")
    checked = {name: SETTINGS[name](name, value, opt_level) for name, value in given.items()}
    plan = replace(plan, **checked)
    plan = replace(plan, policy=plan.policy.settled(device_type))
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
            f"Unexpected opt_level {opt_level!r}. Choose one of {', '.join(map(repr, OPT_LEVELS))} "
            "(a capital letter O and a digit, not two digits)."
        )
    settings: dict[str, Any] = {
        name: default_lower_precision(device_type) if value is LOWER else value
        for name, value in level.settings.items()
    }
    return Plan(opt_level=opt_level, **settings)


# What settings are called elsewhere, and what is meant.
_OTHER_NAMES = {
    "dtype": "cast_model_type",
    "level": "opt_level",
    "mode": "opt_level",
    "model": "models",
    "optimizer": "optimizers",
    "half_dtype": "cast_model_type",
    "init_scale": "loss_scale",
    "fp32_modules": "keep_fp32",
    "allow_banned": "policy",
}


def unknown_setting(name: str, opt_level: str, known: Iterable[str]) -> TypeError:
    """The error for a keyword that `initialize` does not have: it names the one that was probably meant."""
    known = list(known)
    nearest = _OTHER_NAMES.get(name) or next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.0)))
    if nearest == "cast_model_type" and opt_level in ("O1", "O4"):
        nearest = "patch_torch_functions_type"
    return TypeError(
        f"initialize() got an unexpected keyword argument {name!r}. Did you mean {nearest}=? It takes {', '.join(known)}."
    )


def default_lower_precision(device_type: str) -> torch.dtype:
    """float16 on accelerators and bfloat16 on the CPU, unless ``AMPKIT_LOWER_PRECISION`` names one.

    float16 arithmetic on CPUs is emulated and 13 to 80 times slower than bfloat16.
    """
    chosen = os.environ.get(LOWER_PRECISION_VARIABLE)
    if chosen is None:
        return torch.bfloat16 if device_type == "cpu" else torch.float16
    named = {str(dtype).removeprefix("torch."): dtype for dtype in LOWER_PRECISION}
    if chosen not in named:
        raise ConfigurationError(f"{LOWER_PRECISION_VARIABLE}={chosen!r} is none of {', '.join(named)}.")
    return named[chosen]


def _refuse(name: str, value: object, accepted: str, advice: str = "") -> ConfigurationError:
    return ConfigurationError(f"{name}={value!r} is not accepted: expected {accepted}.{' ' + advice if advice else ''}")


def _any_of(accepted: tuple[Any, ...]) -> str:
    """``a``, ``a or b``, ``a, b or c``; None where nothing may be given."""
    *others, last = map(str, accepted or (None,))
    return f"{', '.join(others)} or {last}" if others else last


# A check takes the setting's name, what was given for it and the level, and returns what stands in the plan.
_Check = Callable[[str, Any, str], Any]


def _expect(accepts: Callable[[Any], bool], expected: str, advice: str = "") -> _Check:
    """The check of a setting to which the level does not matter."""

    def check(name: str, value: Any, level: str) -> Any:
        if not accepts(value):
            raise _refuse(name, value, expected, advice)
        return value

    return check


def _word(expected: str, *words: str) -> _Check:
    return _expect(lambda value: isinstance(value, str) and value in words, expected)


def _integer(least: int) -> _Check:
    return _expect(lambda value: type(value) is int and value >= least, f"an integer of at least {least}")


_check_bool = _expect(lambda value: isinstance(value, bool), "True or False")


def _check_bound(name: str, value: Any, level: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        advice = "Sums over a batch may need scales below 1; 0 is no scale."
        raise _refuse(name, value, "a positive, finite number", advice)
    return float(value)


def _check_cast_model_type(name: str, value: Any, level: str) -> torch.dtype | None:
    if level in ("O1", "O4"):
        if value in (False, torch.float32):
            return None
        advice = f"{level} casts around torch functions and leaves the weights float32; to cast the model choose O2, O3 or O5."
        raise _refuse(name, value, f"None or torch.float32 at {level}", advice)
    if value is False:
        return None
    accepted = {"O0": (torch.float32,), "O5": (torch.bfloat16,)}.get(level, (*LOWER_PRECISION, torch.float32))
    if not isinstance(value, torch.dtype) or value not in accepted:
        raise _refuse(name, value, f"{_any_of(accepted)} at {level}", "O2 and O3 take either lower precision.")
    return value


def _check_patch_torch_functions(name: str, value: Any, level: str) -> bool:
    patches: bool = _check_bool(name, value, level)
    if patches and level not in ("O1", "O4"):
        raise _refuse(name, value, f"False at {level}", "Choose opt_level='O1' (or 'O4') to patch them.")
    return patches


def _check_patch_torch_functions_type(name: str, value: Any, level: str) -> torch.dtype:
    accepted = {"O1": LOWER_PRECISION, "O4": (torch.bfloat16,)}.get(level, ())
    if not isinstance(value, torch.dtype) or value not in accepted:
        advice = "" if accepted else "It belongs to O1; O2 and O3 take cast_model_type=."
        raise _refuse(name, value, f"{_any_of(accepted)} at {level}", advice)
    return value


def _check_keep_batchnorm_fp32(name: str, value: Any, level: str) -> bool:
    keeps: bool = _check_bool(name, {"True": True, "False": False}.get(str(value), value), level)
    if level in ("O1", "O4"):
        advice = f"At {level} the weights, norms included, are float32 and the tables decide how norms compute."
        raise _refuse(name, keeps, f"None at {level}", advice)
    return keeps


def _check_master_weights(name: str, value: Any, level: str) -> bool:
    _check_bool(name, value, level)
    if level in ("O1", "O4"):
        advice = "The weights are float32 there and are their own masters."
        raise _refuse(name, value, f"None at {level}", advice)
    return bool(value)


def _check_loss_scale(name: str, value: Any, level: str) -> float | DynamicLossScale:
    if value == "dynamic":
        return DynamicLossScale()
    if isinstance(value, DynamicLossScale):
        return value
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise _refuse(name, value, "'dynamic', a DynamicLossScale or a positive number", "1.0 means no loss scaling.")
    return number


def _check_keep_fp32(name: str, value: Any, level: str) -> tuple[Any, ...]:
    kinds = (str, type, torch.nn.Module)
    items = tuple(value) if isinstance(value, Iterable) and not isinstance(value, kinds) else (value,)
    for item in items:
        if not isinstance(item, kinds):
            raise _refuse(name, item, "modules, module types or name patterns")
    return items


_check_scope_word = _word(
    "'process' (every call of torch is cast) or 'forward' (calls inside the forward of the initialized models are)",
    *("process", "forward"),
)


def _check_scope(name: str, value: Any, level: str) -> str:
    scope: str = _check_scope_word(name, value, level)
    if scope == "forward" and level not in ("O1", "O4"):
        raise ConfigurationError(f"scope='forward' is about casts of calls, which {level} does not make. Use O1 or O4.")
    return scope


#: Every setting but the level itself, with its check.
SETTINGS: dict[str, _Check] = {
    "enabled": _check_bool,
    "cast_model_type": _check_cast_model_type,
    "patch_torch_functions": _check_patch_torch_functions,
    "patch_torch_functions_type": _check_patch_torch_functions_type,
    "keep_batchnorm_fp32": _check_keep_batchnorm_fp32,
    "master_weights": _check_master_weights,
    "loss_scale": _check_loss_scale,
    "cast_model_outputs": _expect(
        lambda value: isinstance(value, torch.dtype) and value.is_floating_point, "a floating-point torch.dtype"
    ),
    "num_losses": _integer(1),
    "verbosity": _integer(0),
    "min_loss_scale": _check_bound,
    "max_loss_scale": _check_bound,
    "keep_fp32": _check_keep_fp32,
    "policy": lambda name, value, level: Policy.of(value),
    "on_floor": _word("'raise' or 'warn'", "raise", "warn"),
    "one_pass_step": _check_bool,
    "check_gradients": _check_bool,
    "scope": _check_scope,
    "lower_precision_weights": _word("'float32', 'keep' or 'refuse'", "float32", "keep", "refuse"),
}
