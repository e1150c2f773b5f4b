"""A step of the fused optimizers, in multi-tensor calls.

A fused optimizer says in `FusedOptimizer.update` how the parameters of one `Batch` move; the rules themselves are the
kernels'. A session, or a GradScaler, passes scale, flag, clipping and rests to a step as `StepInputs`. The host reads none of
them: step counts are tensors on the parameters' device, and do not move where a step is skipped. State and its checkpoints
are those of state.py.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import kernels
from ..dtypes import LOWER_PRECISION
from ..logs import logger
from ..sharding import local
from .in_backward import BackwardHooks
from .scales import Scale, moved_to, norm_of, refuse_to_begin
from .state import KEEPERS, KeepsState

# Arguments of the optimizer that torch would take for settings of one group, where no step reads them.
_OF_ALL_GROUPS = (
    *("state_dtype", "rounding", "rests", "step_in_backward", "max_norm", "clip_value"),
    *("adam_w_mode", "wd_after_momentum", "set_grad_none"),
)
_UNSUPPORTED = {"amsgrad": "the AMSGrad variant", "differentiable": "a step that autograd records"}


@dataclass
class StepInputs:
    """The inputs of one step besides gradients and settings."""

    rests: Mapping[int, torch.Tensor] | None = None  # by the parameter's id; None without a session: it has its own
    inv_scale: Scale | None = None  # multiplies gradients
    clip: torch.Tensor | None = None  # multiplies those of parameters with rests
    found_inf: torch.Tensor | None = None  # if it is not 0, nothing changes
    total_norm: Callable[[], torch.Tensor | None] | None = None  # of all gradients


@dataclass
class Batch:
    """Parameters of one group and device that one multi-tensor call updates: all have rests, or a weight to write, or none has."""

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    states: list[dict[str, Any]]
    lower: list[torch.Tensor] | None  # rests, or weights that new values are rounded into
    inv_scale: Scale | None
    clip: torch.Tensor | None
    found_inf: torch.Tensor | None

    @property
    def device(self) -> torch.device:
        return self.params[0].device

    @property
    def factors(self) -> dict[str, Any]:
        """The kernels' keywords for the factors of the gradients and the flag."""
        return dict(inv_scale=self.inv_scale, clip=self.clip, found_inf=self.found_inf)

    def part(self, indices: list[int]) -> Batch:
        if len(indices) == len(self.params):
            return self
        lists: dict[str, Any] = {name: getattr(self, name) for name in ("params", "grads", "lower", "states")}
        parts: dict[str, Any] = {name: [column[i] for i in indices] for name, column in lists.items() if column}
        return replace(self, **parts)

    def one_more(self) -> Scale:
        """The increment of a step count: 1, or 0 where the step is skipped."""
        return 1.0 if self.found_inf is None else moved_to(self.found_inf, self.device).reshape(()).logical_not()


def _is_number(value: Any, bound: float) -> bool:
    return isinstance(value, numbers.Real) and 0.0 <= float(value) < bound


class FusedOptimizer(KeepsState):
    """A torch optimizer whose step runs over lists of tensors."""

    set_grad_none = True
    keeps_float32_state = True  # the session leaves it alone where the parameters train in lower precision
    takes_step_inputs = True  # a session need not read the flag for it
    takes_rests = False  # its update writes weights and rests together; others step over float32 parameters
    counts_steps = True
    needs_whole_tensors = False  # their norms: parameters that are sharded over processes are refused
    takes_complex = False  # torch.optim squares real and imaginary parts apart
    judges_gradients = False  # without a session: a step whose gradients have no finite norm changes nothing
    step_in_backward = False
    max_norm: float | None = None
    clip_value: float | None = None
    inputs: StepInputs | None = None  # of the step that runs
    grad_norm: torch.Tensor | None = None
    """The norm of all gradients in the last step, unclipped (float32, shape [1]), if it was computed."""
    _skips: torch.Tensor | None = None  # how many steps were skipped, on their device
    more_defaults: dict[str, Any] = {}  # noqa: RUF012  (settings of groups that a derived optimizer has besides)

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, {**defaults, **self.more_defaults})

    def train_lower_precision(
        self, rests: bool, step_in_backward: bool, max_norm: float | None, clip_value: float | None
    ) -> None:
        """Set the constructor's arguments for rests and clipping, before there are groups."""
        kind = type(self).__name__
        for name, value in (("max_norm", max_norm), ("clip_value", clip_value)):
            if value is not None and (not _is_number(value, float("inf")) or not value):
                raise ValueError(f"{kind}: {name}={value!r} is not accepted: expected a number above 0.")
        if max_norm is not None and clip_value is not None:
            raise ValueError(f"{kind}: max_norm and clip_value both clip the gradients. Leave one of the two out.")
        if step_in_backward and max_norm is not None:
            raise ValueError(
                f"{kind}: max_norm needs the gradients of all parameters at once, and with step_in_backward=True each is gone when "
                "the next is made. Use clip_value=, or leave one of the two out."
            )
        self.rests = rests and not self.storage.is_stochastic
        self.step_in_backward, self.max_norm, self.clip_value = step_in_backward, max_norm, clip_value

    @property
    def device_settings(self) -> dict[str, torch.dtype]:
        """Settings of groups that are tensors beside the parameters: a step copies nothing there, so a CUDA graph may hold it."""
        return {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as in torch. Raises ValueError or RuntimeError for what is refused, and leaves the groups as they were."""
        super().add_param_group(param_group)
        kind = type(self).__name__
        try:
            for name in _OF_ALL_GROUPS:
                if name in self.param_groups[-1]:
                    raise ValueError(
                        f"{kind}: a parameter group says {name}={param_group[name]!r}, which is one for all groups. Give it to "
                        "the optimizer, or make an optimizer for these parameters."
                    )
            for param in self.param_groups[-1]["params"]:
                if param.is_complex() and not self.takes_complex:
                    raise RuntimeError(
                        f"{kind} does not support complex parameters; one of shape {tuple(param.shape)} is {param.dtype}. "
                        "Keep torch.view_as_real(parameter) as the parameter, or give it to an optimizer of torch.optim."
                    )
            self.check_group(self.param_groups[-1])
        except (ValueError, RuntimeError):
            del self.param_groups[-1]
            raise
        self._place_settings(self.param_groups[-1])
        self.hooks.follow(self)

    def check_group(self, group: dict[str, Any]) -> None:
        kind = type(self).__name__
        for name in ("lr", "weight_decay", "eps", "momentum", "trust_coefficient"):
            value = group.get(name, 0.0)
            if not (isinstance(value, torch.Tensor) or _is_number(value, float("inf"))):  # a tensor may lie on a device
                raise ValueError(f"{kind}: {name}={value!r} is not accepted: expected a number of at least 0.")
        betas = group.get("betas", (0.0, 0.0))
        if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(_is_number(beta, 1.0) for beta in betas):
            raise ValueError(
                f"{kind}: betas={betas!r} is not accepted: expected two numbers, each at least 0 and below 1."
            )
        refuse_unsupported(kind, **{name: group.get(name, False) for name in _UNSUPPORTED})

    @property
    def hooks(self) -> BackwardHooks:
        hooks: BackwardHooks = self.__dict__.setdefault("_backward_hooks", BackwardHooks())
        return hooks

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.hooks.follow(self)
        for group in self.param_groups:
            self._place_settings(group)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backward passes inside only add to gradients, in float32 for parameters in lower precision: 4 bytes instead of 2.

        ``step`` takes the sums, and ``zero_grad`` ends them. With ``step_in_backward`` the last micro-batch runs outside.
        Raises RuntimeError for sharded parameters, whose sums are FSDP2's.
        """
        self.hooks.widen_sums(self)
        before, self.hooks.accumulates = self.hooks.accumulates, True
        try:
            yield
        finally:
            self.hooks.accumulates = before

    @property
    def skipped_steps(self) -> int:
        """The number of steps that were skipped for gradients that were not finite. Waits for the device, and warns of skips."""
        skips = 0.0 if self._skips is None else self._skips.item()
        if skips > self.hooks.told_of:
            self.hooks.told_of = 2 * skips  # not of each: they may go on
            logger.warning(
                "%s has skipped %d step%s: a gradient was inf or NaN, and nothing was changed. ampkit.diagnose() finds the origin.",
                type(self).__name__,
                skips,
                "s" * (skips > 1),
            )
        return int(skips)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, by None or zeros; by default as the optimizer was constructed (``set_grad_none``)."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)
        self.hooks.end_sums()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns the closure's loss, if there is one."""
        if torch.compiler.is_dynamo_compiling():  # kernels, and state that comes and goes, are no part of a graph
            return torch._dynamo.disable(FusedOptimizer.step)(self, closure)  # type: ignore[no-untyped-call]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        inputs = self.inputs
        if inputs is None:
            self.inputs = _inputs_of_grad_scaler(self)
        try:
            self.judge(self.param_groups)
            self.update_groups()
            self._end_step()
            if self.step_in_backward:  # it took what has no hook: sums, and what was frozen when hooks were set
                self.zero_grad(set_to_none=True)
                self.hooks.follow(self)
        finally:
            self.inputs = inputs
        return loss

    def step_now(self, group: dict[str, Any], param: torch.Tensor) -> None:
        """Update one parameter of a group in a backward pass, when its gradient is complete."""
        alone = {**group, "params": [param]}
        inputs, self.inputs = self.inputs, StepInputs()
        try:
            self.judge([alone])
            self.update_group(alone)
        finally:
            self.inputs = inputs

    @torch.no_grad()
    def judge(self, groups: list[dict[str, Any]]) -> None:
        """Clip the gradients of these groups; without a session, find whether all are finite. Nothing is read from the device."""
        inputs = self.inputs or _NOTHING
        is_alone = self.judges_gradients and inputs.rests is None
        if not is_alone and self.max_norm is None and self.clip_value is None:
            return
        norm = self.global_norm(groups)
        if norm is None:
            return
        if not self.step_in_backward:
            self.grad_norm = norm
        if is_alone:
            bad = norm.isfinite().logical_not().float().reshape(())
            if inputs.found_inf is not None:
                bad = torch.maximum(bad, moved_to(inputs.found_inf, bad.device))
            inputs.found_inf = bad
            self.hooks.heed(bad)
        if self.max_norm is not None:
            clip, inv_scale = kernels.clip_coefficient(norm, self.max_norm), inputs.inv_scale
            inputs.inv_scale = clip if inv_scale is None else clip * moved_to(inv_scale, clip.device)
        if self.clip_value is not None:
            bound: Any = self.clip_value / (1.0 if inputs.inv_scale is None else inputs.inv_scale)  # they may be scaled
            if isinstance(bound, torch.Tensor):
                bound = bound.reshape(())
            for gradient in map(local, self._gradients(groups)):
                gradient.clamp_(-moved_to(bound, gradient.device), moved_to(bound, gradient.device))

    def _end_step(self) -> None:
        """Count a skip. On the CPU, where the host reads it for nothing, warn of it."""
        found_inf = self.hooks.end_step()
        if found_inf is not None:
            if self._skips is None:
                refuse_to_begin("the count of skipped steps", found_inf.device)
                self._skips = torch.zeros_like(found_inf)
            self._skips.add_(found_inf != 0)
            if self._skips.is_cpu and not torch.compiler.is_compiling():
                _ = self.skipped_steps

    def update_groups(self) -> None:
        for group in self.param_groups:
            self.update_group(group)

    @torch.no_grad()
    def update_group(self, group: dict[str, Any]) -> None:
        self._place_settings(group)
        if batches := self.batches(group):
            for step, batch in self.counted(group, batches):
                self.update(group, batch, step)

    def _place_settings(self, group: dict[str, Any]) -> None:
        if self.device_settings and group["params"]:
            device = group["params"][0].device
            for name, dtype in self.device_settings.items():
                group[name] = torch.as_tensor(group[name], dtype=dtype, device=device)

    def update(self, group: dict[str, Any], batch: Batch, step: Scale) -> None:
        """Move the parameters of a batch; ``step`` is the number of this step, 1.0 where steps are not counted."""
        raise NotImplementedError

    def batches(self, group: dict[str, Any]) -> list[Batch]:
        """The parameters of a group that have a gradient, in batches that one call can update."""
        inputs = self.inputs or _NOTHING
        inv_scale = inputs.inv_scale
        if group.get("maximize"):
            inv_scale = -1.0 if inv_scale is None else -inv_scale
        alike: dict[Any, list[Any]] = {}
        if self in KEEPERS:
            self.leave_out_rests([param for param in group["params"] if param.dtype not in LOWER_PRECISION])
        for param in group["params"]:
            gradient = param.grad
            if gradient is None:
                continue
            rest = None
            if param.dtype in LOWER_PRECISION:
                kept = self.state.get(param, {}).get("rest")
                rest = self.own_rest(param) if inputs.rests is None else inputs.rests.get(id(param), kept)
            if gradient.layout is not torch.strided:
                raise RuntimeError(
                    f"{type(self).__name__} does not support sparse gradients; a parameter of shape {tuple(param.shape)} has "
                    "one. Use torch.optim.SparseAdam for it, or sparse=False in the embedding."
                )
            alike.setdefault((rest is None, param.device), []).append((param, gradient, rest))
        batches = []
        for (is_plain, _), rows in alike.items():
            params, grads, rests = map(list, zip(*rows))
            lower, clip = (None, None) if is_plain else (rests, inputs.clip)
            states = [self.state[param] for param in params]
            batches.append(Batch(params, grads, states, lower, inv_scale, clip, inputs.found_inf))
        return batches

    def counted(self, group: dict[str, Any], batches: list[Batch]) -> Iterator[tuple[Scale, Batch]]:
        """Count a step; yields the parameters by the number of their step, as in torch.optim.

        Parameters that have always stepped together share one count, so that counting is one launch.
        """
        for batch in batches:
            if not self.counts_steps:
                yield 1.0, batch
                continue
            one_more = batch.one_more()
            holders: dict[int, tuple[torch.Tensor | None, list[int]]] = {}
            for i, state in enumerate(batch.states):
                step = state.get("step")
                holders.setdefault(id(step), (step, []))[1].append(i)
            for shared, indices in holders.values():
                part = batch.part(indices)
                step = self.own_count(shared, part.params)
                step.add_(one_more)
                yield step, part

    def moments(self, batch: Batch, name: str) -> list[torch.Tensor]:
        """The state ``name`` of each parameter, in the dtype of `Storage`; zeros on first use."""
        moments = []
        for param, state in zip(batch.params, batch.states):
            moment = state.get(name)
            if moment is None:
                refuse_to_begin("the optimizer's state", param.device)
                moment = state[name] = self.storage.zeros(param)
            moments.append(moment)
        return moments

    def global_norm(self, groups: list[dict[str, Any]] | None = None) -> torch.Tensor | None:
        """The norm of all gradients, as they will be used; None where there are none."""
        inputs = self.inputs or _NOTHING
        if inputs.total_norm is not None:
            return inputs.total_norm()
        return norm_of(self._gradients(self.param_groups if groups is None else groups), inputs.inv_scale)

    def _gradients(self, groups: list[dict[str, Any]]) -> list[torch.Tensor]:
        """The gradients of these groups except sparse ones, for which the update raises."""
        every = [param.grad for group in groups for param in group["params"]]
        return [gradient for gradient in every if gradient is not None and gradient.layout is torch.strided]


_NOTHING = StepInputs()


def refuse_unsupported(optimizer: str, **settings: bool) -> None:
    """Raise RuntimeError for a setting of torch's optimizers that is True and that the kernels do not support."""
    twin = "SGD" if "SGD" in optimizer else "Adam" if optimizer == "Adam" else "AdamW"
    for name in [name for name, value in settings.items() if value]:
        raise RuntimeError(f"{optimizer} does not support {_UNSUPPORTED[name]}. Use torch.optim.{twin}({name}=True).")


def where_true(**settings: bool) -> dict[str, bool]:
    """Return the settings that are True. Groups hold no others of them, since Apex's checkpoints do not know them."""
    return {name: value for name, value in settings.items() if value}


def _inputs_of_grad_scaler(optimizer: Any) -> StepInputs:
    """The inputs that a ``torch.amp.GradScaler`` passes in two attributes: the scale of the gradients, and the overflow flag."""
    scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if optimizer.step_in_backward and (scale is not None or found_inf is not None):
        raise RuntimeError(
            f"{type(optimizer).__name__}: with step_in_backward=True weights were updated before GradScaler could unscale their "
            "gradients. Train in bfloat16 without a GradScaler, or with step_in_backward=False."
        )
    return StepInputs(inv_scale=None if scale is None else scale.double().reciprocal().float(), found_inf=found_inf)
