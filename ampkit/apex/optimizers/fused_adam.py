"""``apex.optimizers.fused_adam``: `ampkit.optimizers.FusedAdam`, with the step count in the parameter group.

It also takes the arguments of Apex's first FusedAdam, which scripts of before amp pass and then wrap in `FP16_Optimizer`.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import optimizers as _core
from .. import amp_C
from .layout import StepsInGroups
from .subclassing import ForSubclasses


class FusedAdam(ForSubclasses, StepsInGroups, _core.FusedAdam):
    __doc__ = f"""{_core.FusedAdam.__doc__}
    ``max_grad_norm`` is what `FP16_Optimizer` clips each parameter group to; without that wrapper nothing is clipped.
    ``use_mt`` and ``amp_scale_adjustment`` chose kernels, and are accepted.
    """

    multi_tensor_adam = staticmethod(amp_C.multi_tensor_adam)
    multi_tensor_adam_capturable = staticmethod(amp_C.multi_tensor_adam_capturable)
    multi_tensor_adam_capturable_master = staticmethod(amp_C.multi_tensor_adam_capturable_master)
    groups_are_clipped_by_wrapper = True

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        *,
        max_grad_norm: float = 0.0,
        eps_inside_sqrt: bool = False,
        use_mt: bool = False,
        amp_scale_adjustment: float = 1.0,
        **settings: Any,
    ) -> None:
        if eps_inside_sqrt:
            raise RuntimeError(
                "FusedAdam: eps_inside_sqrt=True is not provided. Leave it out; eps is then added to the root, as in torch.optim."
            )
        super().__init__(
            params,
            lr,
            bias_correction,
            betas,
            eps,
            adam_w_mode,
            weight_decay,
            amsgrad,
            set_grad_none,
            capturable,
            master_weights,
            **settings,
        )
        if max_grad_norm:
            self.defaults["max_grad_norm"] = max_grad_norm
            for group in self.param_groups:
                group.setdefault("max_grad_norm", max_grad_norm)
