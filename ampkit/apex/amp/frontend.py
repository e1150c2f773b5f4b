"""``apex.amp.frontend``: `initialize` with Apex's signature, its options object and its printed banner.

The settings are checked by the core (`ampkit.plan`); this module has Apex's names for them, and Apex's defaults where they
differ: float16 everywhere unless ``AMPKIT_LOWER_PRECISION`` says otherwise, and Apex's tables at O1.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...errors import ConfigurationError
from ...iteration.loss_scale import DynamicLossScale, LossScaler, load_scalers, save_scalers
from ...logs import logger
from ...plan import OPT_LEVELS, resolve
from ...registry import live_sessions
from ._amp_state import _amp_state, maybe_print, warn_or_err
from ._initialize import core_level, open_session

_PATCH_TYPE = "patch_torch_functions_type"


class Properties:
    """The options of an ``initialize``: a dict, ``options``, whose entries are attributes too, checked when they are set."""

    def __init__(self) -> None:
        self.__dict__["options"] = {
            "enabled": False,
            "opt_level": None,
            "cast_model_type": None,
            "patch_torch_functions": False,
            _PATCH_TYPE: None,
            "keep_batchnorm_fp32": None,
            "master_weights": None,
            "loss_scale": 1.0,
        }

    def _update_options_dict(self, new_options: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        for name, value in dict(new_options).items():
            if name not in self.options:
                raise ValueError(f"Tried to set unexpected option {name}; known are {', '.join(self.options)}.")
            self.options[name] = value

    def __getattr__(self, name: str) -> Any:
        options = self.__dict__.get("options", {})
        if name in options:
            return options[name]
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}; its options are {', '.join(options)}."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.options:
            super().__setattr__(name, value)
            return
        try:
            self.options[name] = _checked(self.options["opt_level"], name, value)
        except ConfigurationError as error:
            warn_or_err(str(error))
            self.options[name] = value


_amp_state.opt_properties = _amp_state.opt_properties_before_initialize = Properties()


class _Level:
    """An opt level as Apex had it: called on a `Properties`, it fills in the defaults."""

    name = ""
    differs: dict[str, Any] = {}  # noqa: RUF012  (from the core's level)

    @property
    def brief(self) -> str:
        return OPT_LEVELS[self.name].brief

    @property
    def more(self) -> str:
        return f"See the table of opt levels in ampkit's documentation for {self.name}."

    def __call__(self, properties: Properties) -> Properties:
        defaults = resolve(core_level(self.name), "cuda", self.differs)
        patches = defaults.patch_torch_functions
        properties._update_options_dict(
            {
                "enabled": True,
                "opt_level": self.name,
                "cast_model_type": defaults.cast_model_type,
                "patch_torch_functions": patches,
                _PATCH_TYPE: defaults.patch_torch_functions_type,
                "keep_batchnorm_fp32": defaults.keep_batchnorm_fp32,
                "master_weights": None if patches else defaults.master_weights,
                "loss_scale": defaults.loss_scale if isinstance(defaults.loss_scale, float) else "dynamic",
            }
        )
        return properties


O0, O1, O2, O3, O4 = (type(name, (_Level,), {"name": name}) for name in ("O0", "O1", "O2", "O3", "O4"))


class O5(_Level):
    """The O5 of ROCm's Apex, which casts the model; ampkit's own O5 does not."""

    name = "O5"
    brief = "O5: bfloat16 model with float32 norms and master weights, no loss scale"
    differs = dict(cast_model_type=torch.bfloat16, loss_scale=1.0)  # noqa: RUF012


opt_levels = {level.name: level() for level in (O0, O1, O2, O3, O4, O5)}


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: Any = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    patch_torch_functions_type: torch.dtype | None = None,
) -> Any:
    """Prepare models and optimizers as Apex's ``amp.initialize`` does; `ampkit.initialize` explains the settings.

    It may be called again, for other models or for the same. ``_amp_state`` then shows the newest call, whose loss scalers are
    from then on those of every optimizer, as in Apex: they start anew.
    """
    _amp_state.verbosity = verbosity
    properties = Properties()
    if isinstance(enabled, str) and enabled in opt_levels:
        logger.warning(
            "amp.initialize takes enabled as its third argument, as in Apex: %r counts as True, and the level is %s. Write "
            "opt_level=%r.",
            enabled,
            opt_level,
            enabled,
        )
    if not enabled:
        _amp_state.opt_properties = properties
        return open_session(models, optimizers, properties, num_losses=num_losses)
    if opt_level not in opt_levels:
        resolve(opt_level, "cuda", {})  # raises
    properties = opt_levels[opt_level](properties)
    shows_type = opt_level in ("O4", "O5") or patch_torch_functions_type is not None
    maybe_print(f"Selected optimization level {opt_levels[opt_level].brief}", True)
    maybe_print("Defaults for this optimization level are:", True)
    _print_options(properties, shows_type)

    _amp_state.min_loss_scale, _amp_state.max_loss_scale = min_loss_scale, max_loss_scale
    overrides = {
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        _PATCH_TYPE: patch_torch_functions_type,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
    }
    maybe_print("Processing user overrides (additional kwargs that are not None)...", True)
    user_overrides = {name: value for name, value in overrides.items() if value is not None}
    refused = {name for name, value in user_overrides.items() if not _accepts(opt_level, name, value)}
    for name, value in user_overrides.items():
        setattr(properties, name, value)
    maybe_print("After processing overrides, optimization options are:", True)
    _print_options(properties, shows_type)

    return open_session(
        models,
        optimizers,
        properties,
        num_losses=num_losses,
        cast_model_outputs=cast_model_outputs,
        ignoring=refused,  # only with hard_override
    )


def state_dict(destination: dict | None = None) -> dict[str, dict[str, float | int]]:
    """Return ``{"loss_scaler0": {"loss_scale": float, "unskipped": int}, ...}``, the scalers of the newest ``initialize``."""
    destination = OrderedDict() if destination is None else destination
    for session in live_sessions:
        session.scaling.synchronize()
    save_scalers([_scalers() or []], destination)
    return destination


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Load what `state_dict` returned, here or in Apex."""
    scalers = _scalers()
    load_scalers(None if scalers is None else [scalers], state_dict)


def _scalers() -> list[LossScaler] | None:
    """The core's scalers of ``_amp_state.loss_scalers``; None where the newest ``initialize`` was disabled."""
    scalers = _amp_state.loss_scalers
    return None if scalers and not _amp_state.is_enabled else [scaler.core for scaler in scalers]


def _checked(level: str | None, name: str, value: Any) -> Any:
    """Return the value as Apex's options hold it; raise where the core refuses it."""
    if name == "loss_scale":
        value = value if value == "dynamic" or isinstance(value, DynamicLossScale) else float(value)
    if level is None or name in ("enabled", "opt_level") or value is None:
        return value
    plan = resolve(core_level(level), "cuda", {name: value})
    return value if name == "loss_scale" else getattr(plan, name)


def _accepts(level: str, name: str, value: Any) -> bool:
    try:
        _checked(level, name, value)
    except ConfigurationError:
        return False
    return True


def _print_options(properties: Properties, shows_type: bool) -> None:
    for name, value in properties.options.items():
        if name != _PATCH_TYPE or shows_type:
            maybe_print(f"{name:22} : {value}", True)
