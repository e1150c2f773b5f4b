"""``apex.optimizers.fused_sgd``: `ampkit.optimizers.FusedSGD`, with Apex's arguments."""

from __future__ import annotations

from typing import Any

from ... import optimizers as _core
from .. import amp_C
from .subclassing import ForSubclasses


class FusedSGD(ForSubclasses, _core.FusedSGD):
    __doc__ = f"""{_core.FusedSGD.__doc__}
    ``args`` are those of `ampkit.optimizers.FusedSGD`, ``materialize_master_grads`` before the last, which chose where gradients
    were kept, and is accepted.
    """

    judges_gradients = False  # Apex's steps with what it is given, and keeps no rests
    multi_tensor_sgd = staticmethod(amp_C.multi_tensor_sgd)

    def __init__(self, params: Any, *args: Any, materialize_master_grads: bool = True, **settings: Any) -> None:
        if len(args) > 6:  # after wd_after_momentum
            *first, materialize_master_grads = args[:7]
            args = (*first, *args[7:])
        super().__init__(params, *args, **{"rests": False, **settings})
        self.materialize_master_grads = materialize_master_grads
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False
