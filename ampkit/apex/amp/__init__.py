"""``apex.amp``: Apex's functions and the internals that scripts reach into, over ampkit's sessions.

``_amp_state`` is the state object here, and the module of that name for ``from apex.amp._amp_state import _amp_state``.
"""

from . import __version__ as __version__
from . import compat as compat
from . import lists as lists
from . import opt as opt
from . import rnn_compat as rnn_compat
from . import scaler as scaler
from . import utils as utils
from . import wrap as wrap
from .amp import bfloat16_function as bfloat16_function
from .amp import float_function as float_function
from .amp import half_function as half_function
from .amp import init as init
from .amp import promote_function as promote_function
from .amp import register_bfloat16_function as register_bfloat16_function
from .amp import register_float_function as register_float_function
from .amp import register_half_function as register_half_function
from .amp import register_promote_function as register_promote_function
from .frontend import initialize as initialize
from .frontend import load_state_dict as load_state_dict
from .frontend import state_dict as state_dict
from .handle import disable_casts as disable_casts
from .handle import scale_loss as scale_loss

from ._amp_state import _amp_state as _amp_state  # isort: skip  (after the modules: it takes the name of one)
from ._amp_state import master_params as master_params  # isort: skip
