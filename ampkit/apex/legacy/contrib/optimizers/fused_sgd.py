"""``apex.contrib.optimizers.fused_sgd``: the class of ``apex.optimizers``."""

from ...optimizers import FusedSGD as FusedSGD
