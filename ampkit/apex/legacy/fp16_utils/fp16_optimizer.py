"""``apex.fp16_utils.fp16_optimizer``: master weights and a loss scale around one optimizer, without ``initialize``.

Scripts from before amp use `FP16_Optimizer`: the model is float16 already, the wrapper makes the masters at once
and takes over ``backward``. Its checkpoints hold tensors and plain values only, and load under ``weights_only=True``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ... import kernels
from ...dtypes import LOWER_PRECISION
from ...errors import CheckpointError, LossScaleError
from ...registry import wrapper_of
from ..amp.scaler import LossScaler
from ..around_optimizer import AroundOptimizer
from .fp16util import pairs_of_gradients


class WithMasters(AroundOptimizer):
    """The base of every ``FP16_Optimizer``: the constructor makes masters of each group of ``init_optimizer``, and a loss scale."""

    _add_masters: Callable[[dict[str, Any]], None]
    _begin: Callable[[float, dict[str, Any]], None]

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        if wrapper_of(init_optimizer) is not None:
            raise RuntimeError(
                "FP16_Optimizer was given an optimizer that initialize() has prepared already: it has its masters and its loss "
                "scale. Use amp.scale_loss with it, without FP16_Optimizer."
            )
        self.optimizer, self.dynamic_loss_scale, self.verbose = init_optimizer, dynamic_loss_scale, verbose
        self.fp16_groups: list[list[Any]] = []
        for group in init_optimizer.param_groups:
            self._add_masters(group)
        self._begin(static_loss_scale, dict(dynamic_loss_args or {}))


class FP16_Optimizer(WithMasters):
    """A wrapper of ``init_optimizer``, whose float16 and bfloat16 parameters get float32 masters.

    ``optimizer.backward(loss)`` in place of ``loss.backward()``, then ``optimizer.step()``. Gradients that are not finite
    make the step a no-op, and a dynamic scale falls. ``dynamic_loss_args``: init_scale, scale_factor, scale_window,
    min_loss_scale, max_loss_scale. New scripts are better served by ``ampkit.initialize(..., opt_level="O2")``.
    """

    fp32_from_fp16_groups: list[list[nn.Parameter]]
    fp32_from_fp32_groups: list[list[nn.Parameter]]
    clip_grad_norm = staticmethod(nn.utils.clip_grad_norm_)

    def _begin(self, static_loss_scale: float, arguments: dict[str, Any]) -> None:
        self._say(
            "Warning:  FP16_Optimizer is deprecated and dangerous, and will be deleted soon. amp.initialize is its successor."
        )
        self.all_fp16_params = [param for group in self.fp16_groups for param in group]
        self.all_fp32_from_fp16_params = [param for group in self.fp32_from_fp16_groups for param in group]
        self.all_fp32_from_fp32_params = [param for group in self.fp32_from_fp32_groups for param in group]
        self.loss_scaler: LossScaler = _make_scaler(static_loss_scale, self.dynamic_loss_scale, arguments)
        self.overflow = False
        self.first_closure_call_this_step = True
        self._scale_of_gradients: float | None = None
        self._fp32_are_unscaled = False

    # Attributes that a script reads and writes

    @property
    def loss_scale(self) -> float:
        return self.loss_scaler.loss_scale()

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler._loss_scale = value

    def __repr__(self) -> str:
        return f"FP16_Optimizer({self.optimizer!r})"

    # The iteration

    def zero_grad(self, set_grads_to_None: bool = False, set_to_none: bool | None = None) -> None:
        """Clear the gradients of the model and of the masters."""
        to_none = set_grads_to_None if set_to_none is None else set_to_none
        stepped = (param for group in self.optimizer.param_groups for param in group["params"])
        clear_gradients([*stepped, *self.all_fp16_params], to_none)
        self._scale_of_gradients = None
        self._fp32_are_unscaled = False

    def backward(self, loss: torch.Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Back-propagate the scaled loss, and write the gradients to the masters unless ``update_master_grads=False``.

        Several calls add up; all but the last may leave the masters out, as with gradient accumulation.
        """
        scale = self.loss_scale
        self._rescale_gradients_to(scale)
        (loss.float() * scale).backward(retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    @torch.no_grad()
    def update_master_grads(self) -> None:
        """Unscale the model's gradients into the masters', check them, and move a dynamic scale.

        Gradients of float32 parameters are unscaled where they are.
        """
        scale = self._scale_of_gradients or self.loss_scale
        sources, targets = pairs_of_gradients(self.all_fp16_params, self.all_fp32_from_fp16_params)
        fp32_grads = [] if self._fp32_are_unscaled else _gradients(self.all_fp32_from_fp32_params)
        sources, targets = sources + fp32_grads, targets + fp32_grads
        flag = torch.zeros(1, device=sources[0].device if sources else "cpu")
        kernels.multi_tensor_scale(sources, targets, 1.0 / scale, flag)
        self._fp32_are_unscaled = True
        update = self.loss_scaler.core.update(flag)
        self.overflow = update.overflowed and (self.loss_scaler.dynamic or self.loss_scale != 1.0)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the masters' gradients by their joint norm, which is returned; -1 after an overflow."""
        if self.overflow:
            return -1
        masters = [param for group in self.optimizer.param_groups for param in group["params"]]
        return nn.utils.clip_grad_norm_(masters, max_norm, norm_type)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step and round the masters into the model; after an overflow, neither.

        A ``closure`` calls ``optimizer.backward(loss)`` and returns the loss. It is called again while its gradients overflow.
        """
        if closure is not None:
            result = self._step_with_closure(closure)
        elif self.overflow:
            dynamic = f"Gradient overflow.  Skipping step, reducing loss scale to {self.loss_scale}"
            self._say(dynamic if self.loss_scaler.dynamic else self.loss_scaler.core.overflow_line())
            return None
        else:
            clip_groups(self.optimizer)
            result = self.optimizer.step()
        self._masters_to_model()
        return result

    def inspect_master_grad_data(self) -> list[list[torch.Tensor | None]] | None:
        """Return the masters' gradients, group by group; None after an overflow, when they mean nothing."""
        if self.overflow:
            print(
                "Warning:  calling FP16_Optimizer.inspect_master_grad_data while in an overflow state. Gradients are currently "
                "invalid (may be inf, nan, or stale). Returning None."
            )
            return None
        return [
            [None if param.grad is None else param.grad.data for param in group["params"]]
            for group in self.optimizer.param_groups
        ]

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values: the scaler's state, the optimizer's, and the masters."""
        return {
            "loss_scaler": self.loss_scaler.core.state_dict(),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [[param.detach() for param in group] for group in self.fp32_from_fp16_groups],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state from `state_dict`, or from Apex's, where the scaler was pickled as an object.

        Load the model's own checkpoint as well: only the masters are copied here. A file with a pickled scaler opens with
        ``torch.load(path, weights_only=False)`` alone, which runs code from the file: for files from a source you trust.
        """
        saved = state_dict["fp32_from_fp16"]
        live, stored = (
            [[tuple(param.shape) for param in group] for group in groups]
            for groups in (self.fp32_from_fp16_groups, saved)
        )
        if live != stored:
            raise CheckpointError(
                f"FP16_Optimizer: the checkpoint holds masters of shapes {stored}, this optimizer has {live}. Build the model "
                "and the optimizer as they were when it was saved."
            )
        self._load_scaler(state_dict["loss_scaler"])
        self.dynamic_loss_scale = self.loss_scaler.dynamic
        self.overflow = bool(state_dict["overflow"])
        self.first_closure_call_this_step = bool(state_dict["first_closure_call_this_step"])
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        for group, values in zip(self.fp32_from_fp16_groups, saved):
            for master, value in zip(group, values):
                master.copy_(value)

    # Helpers

    def _add_masters(self, group: dict[str, Any]) -> None:
        halves, masters, floats = [], [], []
        for index, param in enumerate(group["params"]):
            if not param.requires_grad:
                continue
            if param.dtype in LOWER_PRECISION:
                master = nn.Parameter(param.detach().clone().float())
                group["params"][index] = master
                state = self.optimizer.state
                if param in state:
                    state[master] = state.pop(param)
                halves.append(param)
                masters.append(master)
            elif param.dtype is torch.float32:
                floats.append(param)
            else:
                raise TypeError(
                    f"FP16_Optimizer expects parameters of float16, bfloat16 or float32, found {param.dtype}."
                )
        self.fp16_groups.append(halves)
        for name, params in ("fp32_from_fp16_groups", masters), ("fp32_from_fp32_groups", floats):
            vars(self).setdefault(name, []).append(params)
        # State that an earlier step left in lower precision follows the masters.
        for param in group["params"]:
            for name, value in self.optimizer.state.get(param, {}).items():
                if isinstance(value, torch.Tensor) and value.dtype in LOWER_PRECISION:
                    self.optimizer.state[param][name] = value.float()

    @torch.no_grad()
    def _rescale_gradients_to(self, scale: float) -> None:
        """Rescale the gradients of earlier backward passes to the scale of the next pass, which adds to them."""
        before = self._scale_of_gradients or scale
        fp32_grads = _gradients(self.all_fp32_from_fp32_params)
        for grads, factor in (
            (_gradients(self.all_fp16_params), scale / before),
            (fp32_grads, scale if self._fp32_are_unscaled else scale / before),
        ):
            if factor != 1.0:
                kernels.multi_tensor_scale(grads, grads, factor)
        self._scale_of_gradients = scale
        self._fp32_are_unscaled = False

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        def evaluate() -> Any:
            # The masters have moved since they were last copied to the model, except before the first evaluation.
            if self.first_closure_call_this_step:
                self.first_closure_call_this_step = False
            else:
                self._masters_to_model()
            with torch.enable_grad():
                loss = closure()
                while self.overflow:
                    if not self.loss_scaler.dynamic:
                        raise LossScaleError(self.loss_scaler.core.overflow_line())
                    self.loss_scaler.core.report(wait=True)
                    self._say(f"OVERFLOW within closure! Skipping step, reducing loss scale to {self.loss_scale}")
                    loss = closure()
            clip_groups(self.optimizer)
            return loss

        try:
            return self.optimizer.step(evaluate)
        finally:
            self.first_closure_call_this_step = True

    @torch.no_grad()
    def _masters_to_model(self) -> None:
        if self.all_fp16_params:
            torch._foreach_copy_(self.all_fp16_params, [master.detach() for master in self.all_fp32_from_fp16_params])

    def _load_scaler(self, saved: Any) -> None:
        if isinstance(saved, Mapping):
            state = dict(saved)
        else:
            # Apex pickled the object: of amp's LossScaler, or of a still older one.
            scale = getattr(saved, "_loss_scale", getattr(saved, "cur_scale", None))
            if scale is None:
                raise CheckpointError(
                    f"FP16_Optimizer: the checkpoint's 'loss_scaler' is a {type(saved).__name__} without a scale that is known "
                    "here. Put {'loss_scale': 65536.0, 'unskipped': 0} in its place to go on from there."
                )
            state = {"loss_scale": float(scale), "unskipped": int(getattr(saved, "_unskipped", 0))}
        if not self.loss_scaler.dynamic:
            self.loss_scaler = LossScaler(float(state["loss_scale"]))
        self.loss_scaler.core.load_state_dict(state)

    def _say(self, message: str) -> None:
        if self.verbose:
            print(message)


def clip_groups(optimizer: Any) -> None:
    """Clip each group to the ``max_grad_norm`` of Apex's first FusedAdam, which left that to such wrappers."""
    if not hasattr(optimizer, "groups_are_clipped"):
        return
    optimizer.groups_are_clipped = True
    for group in optimizer.param_groups:
        if group.get("max_grad_norm", 0.0) > 0:
            nn.utils.clip_grad_norm_(group["params"], group["max_grad_norm"])


def _make_scaler(static_loss_scale: float, dynamic: bool, arguments: Mapping[str, Any]) -> LossScaler:
    if not dynamic:
        return LossScaler(static_loss_scale)
    try:
        return LossScaler("dynamic", **arguments)
    except TypeError as error:
        raise TypeError(
            "FP16_Optimizer: dynamic_loss_args takes init_scale, scale_factor, scale_window, min_loss_scale and "
            f"max_loss_scale; found {', '.join(arguments)}."
        ) from error


def _gradients(params: list[nn.Parameter]) -> list[torch.Tensor]:
    return [param.grad for param in params if param.grad is not None]


def clear_gradients(params: Iterable[torch.Tensor], to_none: bool) -> None:
    for param in params:
        if to_none:
            param.grad = None
        elif param.grad is not None:
            param.grad.detach_().zero_()
