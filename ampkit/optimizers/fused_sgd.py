"""SGD in multi-tensor calls: the twin of ``torch.optim.SGD``, and Apex's name for it."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import required

from .. import kernels
from .fused import Batch, FusedOptimizer, refuse_unsupported, where_true
from .moments import Storage
from .scales import Scale

_SETTINGS = ("lr", "momentum", "dampening", "weight_decay", "nesterov")


class SGD(FusedOptimizer):
    """``torch.optim.SGD``, which trains parameters in bfloat16 and float16 as float32 values; state loads from and into torch's.

    ``wd_after_momentum`` adds the weight decay to the update instead of the gradient, so that it stays out of the
    momentum. All else that is not torch's is as in `AdamW`.

    Raises ValueError for a rate, momentum or decay that is no number of at least 0, and for ``nesterov`` without momentum or with
    dampening; for the other settings as `AdamW` does.
    """

    counts_steps = False
    takes_rests = True
    judges_gradients = True
    takes_complex = True  # nothing is squared

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        wd_after_momentum: bool = False,
        state_dtype: str | torch.dtype = "float32",
        rests: bool = True,
        step_in_backward: bool = False,
        max_norm: float | None = None,
        clip_value: float | None = None,
        rounding: str = "nearest",
        seed: int = 0,
    ) -> None:
        refuse_unsupported(type(self).__name__, differentiable=differentiable)
        if nesterov and (not momentum or dampening != 0):
            raise ValueError(
                f"Nesterov momentum requires a momentum and zero dampening; found momentum={momentum}, dampening={dampening}."
            )
        self.storage = Storage.of(self, state_dtype, rounding, seed)
        self.counts_steps = self.storage.draws  # random numbers depend on it
        self.train_lower_precision(rests, step_in_backward, max_norm, clip_value)
        defaults = dict(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov)
        super().__init__(params, {**defaults, **self.storage.defaults(seed), **where_true(maximize=maximize)})
        self.wd_after_momentum = wd_after_momentum
        if fused:
            self._step_supports_amp_scaling = True

    def update(self, group: dict[str, Any], batch: Batch, step: Scale) -> None:
        for first_run, part in self._split_by_buffer(group, batch):
            kernels.multi_tensor_sgd(
                part.grads,
                part.params,
                self.moments(part, "momentum_buffer") if group["momentum"] else None,
                part.lower,
                first_run=first_run,
                wd_after_momentum=self.wd_after_momentum,
                trust=self.trust(group, part),
                step=step,
                **{name: group[name] for name in _SETTINGS},
                **part.factors,
                **self.storage.numbers(self, group, part.params),
            )

    def trust(self, group: dict[str, Any], batch: Batch) -> torch.Tensor | None:
        """A factor of the learning rate for each tensor, or None: for LARS."""
        return None

    def _split_by_buffer(self, group: dict[str, Any], batch: Batch) -> list[tuple[bool, Batch]]:
        """Split a batch into (True, parameters without a momentum yet) and (False, the others)."""
        if not group["momentum"]:
            return [(False, batch)]
        # torch.optim.SGD saves None where it has no momentum.
        has_none = [state.get("momentum_buffer") is None for state in batch.states]
        first = [i for i, none in enumerate(has_none) if none]
        later = [i for i, none in enumerate(has_none) if not none]
        parts = [(False, batch.part(later))] if later else []
        # Without dampening zeros become the first momentum, also after steps that were skipped. With it the host has to
        # know whether this is the first step that is taken.
        skipped = first and group["dampening"] and batch.found_inf is not None and bool(batch.found_inf.item())
        return parts if not first or skipped else [*parts, (True, batch.part(first))]


class FusedSGD(SGD):
    """`SGD` under Apex's name, with Apex's arguments and defaults; ``settings`` are the keywords of `SGD`."""

    def __init__(
        self,
        params: Any,
        lr: Any = required,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        set_grad_none: bool = False,
        **settings: Any,
    ) -> None:
        self.set_grad_none = set_grad_none
        first = (lr, momentum, dampening, weight_decay, nesterov)
        super().__init__(params, *first, wd_after_momentum=wd_after_momentum, **settings)
