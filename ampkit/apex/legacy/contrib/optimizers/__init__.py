"""``apex.contrib.optimizers``: the older fused optimizers, and the wrapper they were used in."""

from .fp16_optimizer import FP16_Optimizer as FP16_Optimizer
from .fused_adam import FusedAdam as FusedAdam
from .fused_lamb import FusedLAMB as FusedLAMB
from .fused_sgd import FusedSGD as FusedSGD
