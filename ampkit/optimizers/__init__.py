"""Optimizers that train parameters in bfloat16 and float16 by themselves, and inside of a session.

``AdamW``, ``Adam`` and ``SGD`` have torch's names and arguments, ``FusedAdam`` and ``FusedSGD`` Apex's. Apex's rarer ones are in
the drop-in: ``ampkit.apex.optimizers``.
"""

from .fused_adam import Adam as Adam
from .fused_adam import AdamW as AdamW
from .fused_adam import FusedAdam as FusedAdam
from .fused_sgd import SGD as SGD
from .fused_sgd import FusedSGD as FusedSGD
from .state import float32_state_dict as float32_state_dict
from .state import load_float32 as load_float32
