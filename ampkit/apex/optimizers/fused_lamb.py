"""``apex.optimizers.fused_lamb``: `ampkit.optimizers.FusedLAMB`, with the step count in the parameter group."""

from ... import optimizers as _core
from .layout import StepsInGroups


class FusedLAMB(StepsInGroups, _core.FusedLAMB):
    __doc__ = _core.FusedLAMB.__doc__
