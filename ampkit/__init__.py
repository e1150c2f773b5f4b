"""Mixed precision for PyTorch in two lines: `initialize` and `scale_loss`."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

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
from .integrations.grad_scaler import GradScaler, from_grad_scaler, to_grad_scaler
from .iteration.loss_scale import DynamicLossScale
from .models.forward import cast_inputs
from .policy import Policy
from .registry import current_session
from .session import Session as _Session

if _TYPE_CHECKING:
    from .insight.diagnose import diagnose
    from .insight.explain import explain
    from .insight.record.recorder import recording
    from .insight.steps import loss_scale, on_step
    from .insight.tuning.tune import tune
    from .insight.updates import check_updates

__version__ = "0.1.0"
__all__ = [
    "AmpkitError",
    "CheckpointError",
    "ClosureError",
    "ConfigurationError",
    "DynamicLossScale",
    "ExtensionError",
    "GradScaler",
    "LossIdError",
    "LossScaleError",
    "NotInitializedError",
    "Policy",
    "RefusedOperation",
    "bfloat16_function",
    "cast_inputs",
    "check_updates",
    "clip_grad_norm_",
    "close",
    "current_session",
    "diagnose",
    "disable_casts",
    "explain",
    "float_function",
    "from_grad_scaler",
    "half_function",
    "initialize",
    "keep_casts",
    "load_state_dict",
    "loss_scale",
    "master_params",
    "on_step",
    "optimizers",
    "parallel",
    "promote_function",
    "recording",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "session",
    "state_dict",
    "step_was_skipped",
    "to_grad_scaler",
    "tune",
]


# What looks at a script from outside, and where it lives: imported when it is first asked for.
_INSIGHT = {
    "check_updates": "updates",
    "diagnose": "diagnose",
    "explain": "explain",
    "loss_scale": "steps",
    "on_step": "steps",
    "recording": "record.recorder",
    "tune": "tuning.tune",
}


def __getattr__(name: str) -> _Any:
    if name not in _INSIGHT:
        raise AttributeError(f"module 'ampkit' has no attribute {name!r}")
    return getattr(_import_module(f"ampkit.insight.{_INSIGHT[name]}"), name)


def _explained(session: _Session) -> str:
    """What ``print(session)`` shows. The core knows nothing of insight/, so the table is put on the class here."""
    return str(__getattr__("explain")(session))


_Session.__str__ = _explained  # type: ignore[method-assign, assignment]


def __dir__() -> list[str]:
    """What there is to use. The rooms of the package are attributes too, since Python makes them so."""
    return [*__all__, "__version__", "__doc__", "__file__", "__name__", "__path__"]
