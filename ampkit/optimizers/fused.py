"""What the fused optimizers share: a step in multi-tensor calls, state in float32, checkpoints of two layouts.

A fused optimizer says in `FusedOptimizer.update` how the parameters of one group move; the rules themselves stand in
``kernels/updates.py``. State is float32 whatever the parameters are. ``state_dict`` writes the layout of the torch.optim
twin, where a step count stands in the state of each parameter; ``load_state_dict`` reads that layout and Apex's, where
it stands in the parameter group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

_LOWER_PRECISIONS = (torch.float16, torch.bfloat16)


class FusedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose step runs over lists of tensors."""

    set_grad_none = True
    keeps_float32_state = True  # an adapter leaves it alone where the parameters train in lower precision

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, by None or zeros; by default as the optimizer was constructed (``set_grad_none``)."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns the closure's loss, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update_groups()
        return loss

    @torch.no_grad()
    def update_groups(self) -> None:
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            self.refuse_sparse(params)
            if params:
                self.update(group, params)

    def update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        """Move these parameters of a group, all of which have a gradient."""
        raise NotImplementedError

    def advance(self, group: dict[str, Any], params: list[torch.Tensor]) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Count a step; yields the parameters by the number of their step, as in torch.optim."""
        by_step: dict[int, list[torch.Tensor]] = {}
        for param in params:
            state = self.state[param]
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32)
            state["step"] += 1
            by_step.setdefault(int(state["step"]), []).append(param)
        yield from by_step.items()

    def moments(self, params: list[torch.Tensor], name: str, initial: float = 0.0) -> list[torch.Tensor]:
        """The state of this name of each parameter, made on first use, at least float32."""
        for param in params:
            if name not in self.state[param]:
                dtype = torch.promote_types(torch.float32, param.dtype)
                self.state[param][name] = torch.full_like(param, initial, dtype=dtype, requires_grad=False)
        return [self.state[param][name] for param in params]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this class, of its torch.optim twin, or of Apex."""
        state_dict = self.translated(
            {
                **state_dict,
                "state": {key: dict(state) for key, state in state_dict["state"].items()},
                "param_groups": [dict(group) for group in state_dict["param_groups"]],
            }
        )
        super().load_state_dict(state_dict)
        # torch rounds state to the parameters' dtype.
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for key, param in zip(saved, params):
            if param.dtype in _LOWER_PRECISIONS:
                for name, value in state_dict["state"].get(key, {}).items():
                    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim():
                        self.state[param][name] = value.to(param.device, torch.float32, copy=True)

    def translated(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint of either layout in ours; ``state_dict`` is a copy, two levels deep."""
        for group in state_dict["param_groups"]:
            step = group.pop("step", None)
            for key in group["params"]:
                if step is not None and key in state_dict["state"]:
                    state_dict["state"][key].setdefault("step", torch.tensor(float(step)))
        return self.with_our_groups(state_dict)

    def with_our_groups(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Settings that the other layout does not know keep their values."""
        for theirs, ours in zip(state_dict["param_groups"], self.param_groups):
            for name in self.defaults:
                if name in ours:
                    theirs.setdefault(name, ours[name])
        return state_dict

    def refuse_sparse(self, params: list[torch.Tensor]) -> None:
        for param in params:
            if param.grad.is_sparse:
                raise RuntimeError(
                    f"{type(self).__name__} does not support sparse gradients; a parameter of shape {tuple(param.shape)} has "
                    "one. Use torch.optim.SparseAdam for it, or sparse=False in the embedding."
                )


def refuse_amsgrad(optimizer: FusedOptimizer, amsgrad: bool) -> None:
    if amsgrad:
        raise RuntimeError(
            f"{type(optimizer).__name__} does not support the AMSGrad variant. Use torch.optim.AdamW(amsgrad=True)."
        )


def gradients(params: list[torch.Tensor]) -> list[torch.Tensor]:
    return [param.grad for param in params]
