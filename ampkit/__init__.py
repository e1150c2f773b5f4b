"""Mixed precision for PyTorch in two lines: `initialize` and `scale_loss`."""

import sys as _sys
from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from . import optimizers, parallel
    from .api import (
        clip_grad_norm_,
        close,
        disable_casts,
        initialize,
        keep_casts,
        load_state_dict,
        master_params,
        scale_loss,
        session,
        state_dict,
        step_was_skipped,
    )
    from .casting.decorators import (
        bfloat16_function,
        float_function,
        half_function,
        promote_function,
        register_bfloat16_function,
        register_float_function,
        register_half_function,
        register_promote_function,
    )
    from .errors import (
        AmpkitError,
        CheckpointError,
        ClosureError,
        ConfigurationError,
        ExtensionError,
        LossIdError,
        LossScaleError,
        NotInitializedError,
        RefusedOperation,
    )
    from .insight.diagnose import diagnose
    from .insight.explain import explain
    from .insight.record.recorder import recording
    from .insight.steps import loss_scale, on_step
    from .insight.tuning.tune import tune
    from .insight.updates import check_updates
    from .integrations.grad_scaler import GradScaler, from_grad_scaler, to_grad_scaler
    from .iteration.loss_scale import DynamicLossScale
    from .models.forward import cast_inputs
    from .policy import Policy
    from .registry import current_session

__version__ = "0.1.0"
# fmt: off
__all__ = [
    "AmpkitError", "CheckpointError", "ClosureError", "ConfigurationError", "DynamicLossScale", "ExtensionError",
    "GradScaler", "LossIdError", "LossScaleError", "NotInitializedError", "Policy", "RefusedOperation", "bfloat16_function",
    "cast_inputs", "check_updates", "clip_grad_norm_", "close", "current_session", "diagnose", "disable_casts", "explain",
    "float_function", "from_grad_scaler", "half_function", "initialize", "keep_casts", "load_state_dict", "loss_scale",
    "master_params", "on_step", "optimizers", "parallel", "promote_function", "recording", "register_bfloat16_function",
    "register_float_function", "register_half_function", "register_promote_function", "scale_loss", "session", "state_dict",
    "step_was_skipped", "to_grad_scaler", "tune",
]
# fmt: on


# The module of each name, imported at the first use: ``import ampkit.optimizers`` loads neither casts nor sessions.
_HOMES = {
    "api": "clip_grad_norm_ close disable_casts initialize keep_casts load_state_dict master_params scale_loss session state_dict "
    "step_was_skipped",
    "casting.decorators": "bfloat16_function float_function half_function promote_function register_bfloat16_function "
    "register_float_function register_half_function register_promote_function",
    "errors": "AmpkitError CheckpointError ClosureError ConfigurationError ExtensionError LossIdError LossScaleError "
    "NotInitializedError RefusedOperation",
    "insight.diagnose": "diagnose",
    "insight.explain": "explain",
    "insight.record.recorder": "recording",
    "insight.steps": "loss_scale on_step",
    "insight.tuning.tune": "tune",
    "insight.updates": "check_updates",
    "integrations.grad_scaler": "GradScaler from_grad_scaler to_grad_scaler",
    "iteration.loss_scale": "DynamicLossScale",
    "models.forward": "cast_inputs",
    "policy": "Policy",
    "registry": "current_session",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
# Names of torch.amp and apex.amp that ampkit lacks, and what to use instead.
_INSTEAD = {
    "amp": "ampkit takes the place of apex.amp itself: ampkit.initialize, ampkit.scale_loss.",
    "autocast": "opt_level='O1' casts what the script calls and 'O5' what its models call; ampkit.disable_casts() is enabled=False",
    "custom_bwd": "backward passes run in the dtypes of their forwards by themselves",
    "custom_fwd": "ampkit.float_function, half_function and bfloat16_function decorate functions",
    "scale": "`with ampkit.scale_loss(loss, optimizer) as scaled: scaled.backward()` scales a loss",
    "unscale_": "gradients are unscaled where the block of ampkit.scale_loss ends: clip between the block and optimizer.step()",
    "update": "the loss scale follows by itself when the block of ampkit.scale_loss ends",
}


def __getattr__(name: str) -> _Any:
    if name not in _HOME_OF:
        if name.startswith("_") or _find_spec(f"ampkit.{name}") is None:
            instead = f": {_INSTEAD[name]}." if name in _INSTEAD else ""
            raise AttributeError(f"module 'ampkit' has no attribute {name!r}{instead}")
        return _import_module(f"ampkit.{name}")
    value = globals()[name] = getattr(_import_module(f"ampkit.{_HOME_OF[name]}"), name)
    return value


class _Package(_ModuleType):
    """The class of this module: it keeps Python from writing the module ``ampkit.session`` over the function of that name."""

    def __setattr__(self, name: str, value: _Any) -> None:
        if name not in _HOME_OF or not isinstance(value, _ModuleType):
            super().__setattr__(name, value)


_sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    """The public names, without the submodules that Python makes attributes too."""
    return [*__all__, "__version__", "__doc__", "__file__", "__name__", "__path__"]
