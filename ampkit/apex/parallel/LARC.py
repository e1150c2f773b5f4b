"""``apex.parallel.LARC``: layer-wise adaptive rates around any optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..around_optimizer import AroundOptimizer
from ..multi_tensor_steps import tensor_norms


class LARC(AroundOptimizer):
    """A wrapper that scales each gradient so that ``optimizer`` moves a tensor by a share of the tensor's own norm.

    The local rate is ``trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)``. With ``clip`` it can only lower the
    optimizer's learning rate; without, the two are multiplied. Weight decay is part of the scaled gradient. Give learning-rate
    schedulers the inner optimizer, ``.optim``, and ``initialize`` and ``scale_loss`` the LARC.

    Raises TypeError for an argument that is no optimizer.

    Source: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks", 2017; the clipping is NVIDIA's.
    """

    needs_whole_tensors = True
    _inside = "optim"

    def __init__(self, optimizer: Any, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8) -> None:
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"LARC goes around an optimizer, found a {type(optimizer).__name__}. Build the optimizer first: "
                "LARC(torch.optim.SGD(model.parameters(), lr=0.1))."
            )
        self.optim: torch.optim.Optimizer = optimizer  # or what has its attributes
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps

    def __repr__(self) -> str:
        return repr(self.optim)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, without attributes that a session has set, as torch's optimizers do."""
        return {name: vars(self)[name] for name in ("optim", "trust_coefficient", "clip", "eps")}

    @property
    def keeps_float32_state(self) -> bool:
        return getattr(self.optim, "keeps_float32_state", False)

    @property
    def keeps_narrow_state(self) -> bool:
        return getattr(self.optim, "keeps_narrow_state", False)

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optim.defaults

    def state_dict(self) -> dict[str, Any]:
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Scale the gradients and step. A ``closure`` is evaluated once, before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        decays = [group.get("weight_decay") for group in self.param_groups]
        try:
            for group in self.param_groups:
                if group.get("weight_decay") is not None:
                    self._scale_gradients(group, group["weight_decay"])
                    group["weight_decay"] = 0.0
                else:
                    self._scale_gradients(group, 0.0)
            result = self.optim.step()
        finally:
            for group, decay in zip(self.param_groups, decays):
                if decay is not None:
                    group["weight_decay"] = decay
        return result if loss is None else loss

    @torch.no_grad()
    def _scale_gradients(self, group: dict[str, Any], weight_decay: float) -> None:
        params = [param for param in group["params"] if param.grad is not None]
        if not params:
            return
        grads = [param.grad for param in params]
        w, g = tensor_norms(params), tensor_norms(grads)
        rates = self.trust_coefficient * w / (g + w * weight_decay + self.eps)
        if self.clip:
            rates = (rates / group["lr"]).clamp(max=1.0)
        # A tensor of zeros has no norm to scale by: it moves at the optimizer's own rate.
        adapts = (w > 0) & (g > 0)
        decays = torch.where(adapts, weight_decay, 0.0)
        rates = torch.where(adapts, rates, torch.ones_like(rates))
        for param, gradient, decay, rate in zip(params, grads, decays.unbind(), rates.unbind()):
            if weight_decay:
                gradient.add_(param.to(gradient.dtype) * decay.to(gradient))
            gradient.mul_(rate.to(gradient))
