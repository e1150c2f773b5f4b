"""``apex.optimizers.fused_adam``: `ampkit.optimizers.FusedAdam`, with the step count in the parameter group.

It also takes the arguments of Apex's first FusedAdam, which scripts of before amp pass and then wrap in `FP16_Optimizer`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ... import optimizers as _core
from ...dtypes import LOWER_PRECISION
from ...logs import logger
from .. import amp_C
from .grad_scalers import told_by
from .layout import StepsInGroups
from .own_masters import OwnMasters
from .subclassing import ForSubclasses

_REMOVED = ("grads", "output_params", "scale", "grad_norms")


class FusedAdam(ForSubclasses, StepsInGroups, OwnMasters, _core.FusedAdam):
    __doc__ = f"""{_core.FusedAdam.__doc__}
    ``master_weights=True`` updates float32 copies of lower-precision parameters; RuntimeError without ``capturable``.
    ``max_grad_norm`` is what `FP16_Optimizer` clips each parameter group to; without that wrapper nothing is clipped, which the
    first step tells. ``use_mt`` and ``amp_scale_adjustment`` chose kernels, and are accepted.
    """

    judges_gradients = False  # Apex's steps with any gradients, and keeps no rests
    multi_tensor_adam = staticmethod(amp_C.multi_tensor_adam)
    multi_tensor_adam_capturable = staticmethod(amp_C.multi_tensor_adam_capturable)
    multi_tensor_adam_capturable_master = staticmethod(amp_C.multi_tensor_adam_capturable_master)
    #: `FP16_Optimizer` sets it, and clips each group to its ``max_grad_norm`` before a step.
    groups_are_clipped = False

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
        if master_weights and not capturable:
            raise RuntimeError(
                "FusedAdam: master_weights=True requires capturable=True. Set both, or use initialize(), O2."
            )
        first = (lr, bias_correction, betas, eps, adam_w_mode, weight_decay, amsgrad, set_grad_none, capturable)
        super().__init__(params, *first, **{"rests": False, **settings})
        self.master_weights = master_weights
        if master_weights:
            self.takes_step_inputs = False  # it writes the parameters itself
            for group in self.param_groups:
                for param in group["params"]:
                    if param.dtype in LOWER_PRECISION:
                        self.make_master(param)
        if max_grad_norm:
            self.defaults["max_grad_norm"] = max_grad_norm
            for group in self.param_groups:
                group.setdefault("max_grad_norm", max_grad_norm)
            self.register_step_pre_hook(_warn_of_unclipped)

    @property
    def param_groups_master(self) -> list[dict[str, Any]]:
        """The float32 copies of lower-precision parameters, group by group."""
        return self.groups_of_masters(lambda param: param)

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = None,
        grad_norms: Any = None,
        grad_scaler: Any = None,
    ) -> Any:
        """Make one update. Only the arguments ``closure`` and, if capturable, ``grad_scaler`` still have a meaning."""
        names = [name for name, value in zip(_REMOVED, (grads, output_params, scale, grad_norms)) if value is not None]
        if names:
            raise RuntimeError(
                f"FusedAdam has been updated. Simply initialize it like torch.optim.AdamW and call step(); {', '.join(names)} "
                "can no longer be passed to it. For mixed precision call initialize(model, optimizer, opt_level='O2')."
            )
        with told_by(grad_scaler, self):
            return super().step(closure)


def _warn_of_unclipped(optimizer: FusedAdam, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Warn that nothing is clipped: without the wrapper, and without ``grad_norms=``, Apex clipped nothing either."""
    if not optimizer.groups_are_clipped and kwargs.get("grad_norms") is None:
        optimizer.groups_are_clipped = True  # told once
        logger.warning(
            "FusedAdam(max_grad_norm=%g) clips inside of FP16_Optimizer only, as in Apex: here nothing is clipped. Call "
            "torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), %g) before step(), or leave max_grad_norm out.",
            optimizer.defaults["max_grad_norm"],
            optimizer.defaults["max_grad_norm"],
        )
