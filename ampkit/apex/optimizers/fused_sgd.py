"""``apex.optimizers.fused_sgd``: `ampkit.optimizers.FusedSGD`."""

from ... import optimizers as _core
from .. import amp_C
from .subclassing import ForSubclasses


class FusedSGD(ForSubclasses, _core.FusedSGD):
    __doc__ = _core.FusedSGD.__doc__

    multi_tensor_sgd = staticmethod(amp_C.multi_tensor_sgd)
