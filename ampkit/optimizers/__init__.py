"""The fused optimizers. Apex's rarer ones are in the drop-in: ``ampkit.apex.optimizers``."""

from .fused_adam import FusedAdam as FusedAdam
from .fused_sgd import FusedSGD as FusedSGD
