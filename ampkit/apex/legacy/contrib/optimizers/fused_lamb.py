"""``apex.contrib.optimizers.fused_lamb``: the class of ``apex.optimizers``."""

from ...optimizers import FusedLAMB as FusedLAMB
