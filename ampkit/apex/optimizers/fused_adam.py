"""``apex.optimizers.fused_adam``: `ampkit.optimizers.FusedAdam`, with the step count in the parameter group.

It also takes the arguments of Apex's first FusedAdam, which scripts of before amp pass and then wrap in `FP16_Optimizer`.
"""

from __future__ import annotations

from typing import Any

from ... import optimizers as _core
from ...logs import logger
from .. import amp_C
from .layout import StepsInGroups
from .subclassing import ForSubclasses


class FusedAdam(ForSubclasses, StepsInGroups, _core.FusedAdam):
    __doc__ = f"""{_core.FusedAdam.__doc__}
    ``max_grad_norm`` is what `FP16_Optimizer` clips each parameter group to; without that wrapper nothing is clipped, which the
    first step tells. ``use_mt`` and ``amp_scale_adjustment`` chose kernels, and are accepted.
    """

    multi_tensor_adam = staticmethod(amp_C.multi_tensor_adam)
    multi_tensor_adam_capturable = staticmethod(amp_C.multi_tensor_adam_capturable)
    multi_tensor_adam_capturable_master = staticmethod(amp_C.multi_tensor_adam_capturable_master)
    #: `FP16_Optimizer` sets it, and clips each group to its ``max_grad_norm`` before a step.
    groups_are_clipped = False

    def __init__(
        self,
        params: Any,
        *args: Any,
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
        super().__init__(params, *args, **settings)
        if max_grad_norm:
            self.defaults["max_grad_norm"] = max_grad_norm
            for group in self.param_groups:
                group.setdefault("max_grad_norm", max_grad_norm)
            self.register_step_pre_hook(_warn_of_unclipped)


def _warn_of_unclipped(optimizer: FusedAdam, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Without the wrapper, and without norms given to the step (``grad_norms=``), Apex clipped nothing, and did not say so."""
    if not optimizer.groups_are_clipped and kwargs.get("grad_norms") is None:
        optimizer.groups_are_clipped = True  # told once
        logger.warning(
            "FusedAdam(max_grad_norm=%g) clips inside of FP16_Optimizer only, as in Apex: here nothing is clipped. Call "
            "torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), %g) before step(), or leave max_grad_norm out.",
            optimizer.defaults["max_grad_norm"],
            optimizer.defaults["max_grad_norm"],
        )
