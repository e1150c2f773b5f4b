"""``apex.optimizers.fused_sgd``: `ampkit.optimizers.FusedSGD`."""

from ... import optimizers as _core


class FusedSGD(_core.FusedSGD):
    __doc__ = _core.FusedSGD.__doc__
