"""``apex.amp._initialize``: opens a session of the core for the options of an ``amp.initialize``.

It translates the options, fills ``_amp_state``, and sets the attributes of optimizers that scripts expect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ... import api, validation
from ...casting.engine import active_casting
from ...casting.tensors import cast_floating, map_tensors
from ...dtypes import CASTABLE
from ...errors import ConfigurationError
from ...logs import logger
from ...policy import Policy
from ...registry import current_session, live_sessions
from ...session import Session
from ..parallel import DistributedDataParallel
from . import _printing
from ._amp_state import _amp_state
from ._process_optimizer import dress
from .handle import AmpHandle, NoOpHandle
from .lists import rules_changed_by_the_script
from .scaler import LossScaler


def core_level(level: str) -> str:
    """The core's level for one of Apex's: O5 of ROCm's Apex is O2 in bfloat16, without a loss scale."""
    return "O2" if level == "O5" else level


def open_session(
    models: Any,
    optimizers: Any,
    properties: Any,
    *,
    num_losses: int = 1,
    cast_model_outputs: torch.dtype | None = None,
    ignoring: set[str] = frozenset(),
) -> Any:
    """Open the session of an ``amp.initialize`` with these options, and return what that returns."""
    _printing.attach()
    if not properties.enabled:
        with _printing.only_warnings():
            returned = api.initialize(models, optimizers, enabled=False)
        _amp_state.opt_properties, _amp_state.handle = properties, NoOpHandle()
        _amp_state.loss_scalers = [LossScaler(1.0) for _ in range(num_losses)]
        return returned

    _refuse_fp16_optimizers(optimizers)
    _refuse_wrapped(models)
    accepts_lower = _amp_state.allow_incoming_model_not_fp32 or _amp_state.hard_override
    level, options = properties.opt_level, properties.options
    patches = properties.patch_torch_functions and "patch_torch_functions" not in ignoring
    if accepts_lower and options["cast_model_type"] is torch.float32:
        for model in validation.models(models):
            model.float()
    if patches:
        _end_casts_of_other_kinds(options["patch_torch_functions_type"])
    settings = {
        name: options[name]
        for name in ("cast_model_type", "keep_batchnorm_fp32", "master_weights", "loss_scale")
        if options[name] is not None and name not in ignoring
    }
    if options["cast_model_type"] is None and level not in ("O1", "O4"):
        settings["cast_model_type"] = False
    if level in ("O1", "O4"):
        settings["patch_torch_functions"] = patches
        if patches:
            settings["patch_torch_functions_type"] = options["patch_torch_functions_type"]
    with _printing.only_warnings():
        returned = api.initialize(
            models,
            optimizers,
            opt_level=core_level(level),
            cast_model_outputs=cast_model_outputs,
            num_losses=max(num_losses, 1),  # scripts say 0 where another call brings the optimizer
            verbosity=max(int(_amp_state.verbosity), 0),  # scripts say False, too
            min_loss_scale=_amp_state.min_loss_scale or None,
            max_loss_scale=_amp_state.max_loss_scale,
            policy="apex",
            on_floor="warn",
            lower_precision_weights="keep" if accepts_lower else "refuse",
            **settings,
        )
    show(current_session(), properties, num_losses)
    return returned


def show(session: Session, properties: Any, num_losses: int | None = None) -> None:
    """Show a session in ``_amp_state``, and give its optimizers the attributes that Apex's had."""
    _amp_state.opt_properties = properties
    _amp_state.loss_scalers = [LossScaler.of(scaler) for scaler in session.scalers[:num_losses]]
    if session.casting is not None:
        _amp_state.handle = AmpHandle.of(session)
        for rule in rules_changed_by_the_script():
            session.casting.register(rule.kind, rule.owner, rule.name)
    else:
        _amp_state.handle = NoOpHandle()
    for optimizer in session.optimizers:
        dress(optimizer, session)


def check_models(models: Any) -> None:
    """Raise for models that ``initialize`` would refuse."""
    _refuse_wrapped(models)
    validation.models(models)


def check_optimizers(optimizers: Any) -> None:
    """Raise for optimizers that ``initialize`` would refuse."""
    _refuse_fp16_optimizers(optimizers)
    validation.optimizers(optimizers)


def to_type(dtype: torch.dtype, tensor: Any) -> Any:
    """Cast ``tensor`` to ``dtype`` if it is floating-point."""
    return cast_floating(tensor, dtype)


def applier(value: Any, fn: Callable[[torch.Tensor], Any]) -> Any:
    """Apply ``fn`` to every floating-point tensor in ``value``, however nested."""
    return map_tensors(value, lambda tensor: fn(tensor) if tensor.dtype in CASTABLE else tensor)


def _refuse_wrapped(models: Any) -> None:
    for model in validation.flatten(models):
        if isinstance(model, DistributedDataParallel):
            raise ConfigurationError(
                f"Incoming model is an instance of {type(model)}. Call amp.initialize on the bare model, and wrap what it returns."
            )


def _refuse_fp16_optimizers(optimizers: Any) -> None:
    for optimizer in validation.flatten(optimizers):
        if any(cls.__name__ == "FP16_Optimizer" for cls in type(optimizer).__mro__):
            raise ConfigurationError(
                f"An incoming optimizer is an instance of {type(optimizer)}, which makes master weights and scales losses itself. "
                "Pass the optimizer that it wraps: amp.initialize() does both."
            )


def _end_casts_of_other_kinds(lower_precision: torch.dtype) -> None:
    """End casts by other tables or dtypes: torch can be patched in one way at a time, and as in Apex the newest call decides."""
    casting = active_casting()
    if casting is None or (casting.lower_precision is lower_precision and casting.policy == Policy("apex")):
        return
    users = [session for session in live_sessions if session.casting is casting]
    for session in users:
        session.stop_casting()
    logger.warning(
        "amp.initialize: torch functions were patched for %s and are from now on for %s; models initialized before run uncast.",
        casting.lower_precision,
        lower_precision,
    )
