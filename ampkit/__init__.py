"""Mixed precision for PyTorch in two lines: `initialize` and `scale_loss`."""

from .api import clip_grad_norm_ as clip_grad_norm_
from .api import close as close
from .api import disable_casts as disable_casts
from .api import from_grad_scaler as from_grad_scaler
from .api import initialize as initialize
from .api import load_state_dict as load_state_dict
from .api import master_params as master_params
from .api import scale_loss as scale_loss
from .api import session as session
from .api import state_dict as state_dict
from .api import step_was_skipped as step_was_skipped
from .api import to_grad_scaler as to_grad_scaler
from .casting.decorators import bfloat16_function as bfloat16_function
from .casting.decorators import float_function as float_function
from .casting.decorators import half_function as half_function
from .casting.decorators import promote_function as promote_function
from .casting.decorators import register_bfloat16_function as register_bfloat16_function
from .casting.decorators import register_float_function as register_float_function
from .casting.decorators import register_half_function as register_half_function
from .casting.decorators import register_promote_function as register_promote_function
from .errors import AmpkitError as AmpkitError
from .errors import CheckpointError as CheckpointError
from .errors import ClosureError as ClosureError
from .errors import ConfigurationError as ConfigurationError
from .errors import ExtensionError as ExtensionError
from .errors import LossIdError as LossIdError
from .errors import LossScaleError as LossScaleError
from .errors import NotInitializedError as NotInitializedError
from .errors import RefusedOperation as RefusedOperation
from .iteration.loss_scale import DynamicLossScale as DynamicLossScale
from .models import cast_inputs as cast_inputs
from .policy import Policy as Policy
from .registry import current_session as current_session

__version__ = "0.1.0"
