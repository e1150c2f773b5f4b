"""``apex.optimizers.fused_lars``: `ampkit.optimizers.FusedLARS`."""

from ... import optimizers as _core


class FusedLARS(_core.FusedLARS):
    __doc__ = _core.FusedLARS.__doc__
