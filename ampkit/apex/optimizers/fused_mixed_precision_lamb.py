"""``apex.optimizers.fused_mixed_precision_lamb``: `ampkit.optimizers.FusedMixedPrecisionLamb`."""

from ... import optimizers as _core


class FusedMixedPrecisionLamb(_core.FusedMixedPrecisionLamb):
    __doc__ = _core.FusedMixedPrecisionLamb.__doc__
