"""``apex.optimizers.fused_lamb``: `ampkit.optimizers.FusedLAMB`, with the step count in the parameter group."""

from ... import optimizers as _core
from .. import amp_C
from .layout import StepsInGroups
from .subclassing import ForSubclasses


class FusedLAMB(ForSubclasses, StepsInGroups, _core.FusedLAMB):
    __doc__ = _core.FusedLAMB.__doc__

    multi_tensor_l2norm = staticmethod(amp_C.multi_tensor_l2norm)
    multi_tensor_lamb = staticmethod(amp_C.multi_tensor_lamb)
