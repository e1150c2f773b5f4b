"""``apex.optimizers.fused_sgd``: `ampkit.optimizers.FusedSGD`, with Apex's arguments."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import required

from ... import optimizers as _core
from .. import amp_C
from .subclassing import ForSubclasses


class FusedSGD(ForSubclasses, _core.FusedSGD):
    __doc__ = f"""{_core.FusedSGD.__doc__}
    ``materialize_master_grads`` chose where gradients were kept, and is accepted.
    """

    judges_gradients = False  # Apex's steps with any gradients, and keeps no rests
    multi_tensor_sgd = staticmethod(amp_C.multi_tensor_sgd)

    def __init__(
        self,
        params: Any,
        lr: Any = required,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
        **settings: Any,
    ) -> None:
        first = (lr, momentum, dampening, weight_decay, nesterov, wd_after_momentum, set_grad_none)
        super().__init__(params, *first, **{"rests": False, **settings})
        self.materialize_master_grads = materialize_master_grads
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False
