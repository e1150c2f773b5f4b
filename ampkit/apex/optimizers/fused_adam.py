"""``apex.optimizers.fused_adam``: `ampkit.optimizers.FusedAdam`, with the step count in the parameter group."""

from ... import optimizers as _core
from .layout import StepsInGroups


class FusedAdam(StepsInGroups, _core.FusedAdam):
    __doc__ = _core.FusedAdam.__doc__
