"""The base of ``FP16_Optimizer`` in ``apex.optimizers`` and ``apex.contrib``: masters, and a loss scale in attributes.

Scripts of 2018 read the attributes, override `_update_scale`, and load checkpoints of this layout. The class of
``apex.fp16_utils`` is another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from .. import kernels
from ..errors import CheckpointError
from .fp16_utils.fp16_optimizer import WithMasters, clear_gradients, clip_groups
from .fp16_utils.loss_scaler import DynamicLossScaler

_SCALE = ("cur_scale", "cur_iter")
_DYNAMIC = ("last_overflow_iter", "scale_factor", "scale_window")


class MastersOfGroups(WithMasters, DynamicLossScaler):
    """Float32 masters of all parameters of an optimizer, which steps with them; a subclass defines their layout in a group.

    ``backward(loss)``, then ``step()``: after an overflow nothing is updated, and a dynamic scale falls, to 1 at least.
    ``dynamic_loss_args`` are those of `DynamicLossScaler`.
    """

    #: The attribute, and the entry of ``state_dict()``, that holds the masters.
    masters: ClassVar[str]

    def _begin(self, static_loss_scale: float, arguments: dict[str, Any]) -> None:
        scale = {"init_scale": 2.0**16, **arguments} if self.dynamic_loss_scale else {"init_scale": static_loss_scale}
        DynamicLossScaler.__init__(self, **scale)

    def _add_masters(self, group: dict[str, Any]) -> None:
        params = list(group["params"])
        if len({param.dtype for param in params}) > 1:
            raise TypeError(
                "FP16_Optimizer found parameters of several dtypes in one group; give those of each dtype a group of their own."
            )
        self.fp16_groups.append(params)
        group["params"] = self._make_masters(params)

    def _make_masters(self, params: list[torch.Tensor]) -> list[torch.Tensor]:
        raise NotImplementedError

    def _stored(self, index: int) -> list[torch.Tensor]:
        """The tensors that the model computes with, one for each master of a group."""
        raise NotImplementedError

    def _laid_out(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Lay out tensors of a group's parameters as its masters are."""
        raise NotImplementedError

    def zero_grad(self, set_grads_to_None: bool = True) -> None:
        """Clear the gradients of the model."""
        clear_gradients((param for group in self.fp16_groups for param in group), set_grads_to_None)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        (loss.float() * self.cur_scale).backward(retain_graph=retain_graph)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Step with the masters and round them into the model; after an overflow, neither. ``closure`` is not called."""
        groups = [
            self._laid_out([param.new_zeros(param.shape) if param.grad is None else param.grad for param in params])
            for params in self.fp16_groups
        ]
        flag = torch.zeros(1, device=groups[0][0].device)
        for group, gradients in zip(self.optimizer.param_groups, groups):
            for master in group["params"]:
                master.grad = torch.empty_like(master)
            kernels.multi_tensor_scale(gradients, [m.grad for m in group["params"]], 1.0 / self.cur_scale, flag)
        overflows = bool(flag.item())
        if not overflows:
            clip_groups(self.optimizer)
            self.optimizer.step()
            for index, group in enumerate(self.optimizer.param_groups):
                torch._foreach_copy_(self._stored(index), [master.detach() for master in group["params"]])
        self._update_scale(overflows)

    def _update_scale(self, skip: bool) -> None:
        """End an iteration, which may have been skipped."""
        if skip and self.verbose:
            kind = "dynamic" if self.dynamic_loss_scale else "static"
            print(f"\nGrad overflow on iteration {self.cur_iter}\nUsing {kind} loss scale of {self.cur_scale}")
        if self.dynamic_loss_scale:
            self.update_scale(skip)
        else:
            self.cur_iter += 1

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors, under Apex's names."""
        names = (*_SCALE, *(_DYNAMIC if self.dynamic_loss_scale else ()))
        return {
            "dynamic_loss_scale": self.dynamic_loss_scale,
            **{name: getattr(self, name) for name in names},
            "optimizer_state_dict": self.optimizer.state_dict(),
            self.masters: getattr(self, self.masters),
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state from `state_dict`, here or in Apex. The model loads its own checkpoint, or follows at the next step."""
        saved = state_dict.get(self.masters)
        live, stored = ([_shapes(group) for group in groups or ()] for groups in (getattr(self, self.masters), saved))
        if live != stored:
            raise CheckpointError(
                f"FP16_Optimizer of {type(self).__module__}: expected {self.masters!r} of shapes {live}, found {stored} among "
                f"{sorted(state_dict)}. Build model and optimizer as they were; the class of another module has another layout."
            )
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        for name in (*_SCALE, *_DYNAMIC):
            setattr(self, name, state_dict.get(name, getattr(self, name)))
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        for group, values in zip(getattr(self, self.masters), saved):
            torch._foreach_copy_(_as_list(group), _as_list(values))


def _as_list(group: Any) -> list[torch.Tensor]:
    return [group] if isinstance(group, torch.Tensor) else list(group)


def _shapes(group: torch.Tensor | Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in _as_list(group)]
