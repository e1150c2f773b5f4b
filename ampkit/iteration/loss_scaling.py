"""The loss scaling of one session: its scalers, and the end of an iteration.

Fresh gradients are checked and collected in one pass, the loss scale moves on its device, and the optimizers get what was found.
Fused optimizers take it on the device, others read it at their next step.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ..errors import LossIdError, LossScaleError
from ..optimizers.scales import on
from ..sharding import highest
from .advice import Advice, watched
from .found_inf import FoundInf, constant, is_known_clean
from .gradients import Gradients
from .loss_scale import LossScaler
from .optimizer_wrapper import OptimizerWrapper
from .slots import BackwardPass, Slot, Slots

_CHECKS_RANKS = os.environ.get("AMPKIT_CHECK_RANKS") == "1"


class LossScaling:
    """One loss scaler per loss, and the steps of an iteration that they take part in."""

    def __init__(self, plan: Any) -> None:
        self.plan = plan
        bounds = (plan.min_loss_scale, plan.max_loss_scale)
        number = plan.num_losses if plan.enabled else 0
        of_apex = plan.policy.base == "apex"
        self.scalers = [
            LossScaler(plan.loss_scale, *bounds, loss_id, plan.on_floor, of_apex) for loss_id in range(number)
        ]
        self.ddp: Callable[[], DistributedDataParallel | None] = lambda: None  # whose forward pass ran last
        self._runs_without_sync = False
        self.held_scale: float | torch.Tensor | None = None  # of gradients that FSDP2 has yet to reduce
        self.unowned = Gradients()
        self._number_owned = -1
        self.advice = Advice()

    def scaler(self, loss_id: int) -> LossScaler:
        """The loss scaler of a loss, 0 to ``num_losses`` - 1."""
        if isinstance(loss_id, bool) or not isinstance(loss_id, int) or not 0 <= loss_id < len(self.scalers):
            raise LossIdError(
                f"loss_id={loss_id!r} is out of range: this session has num_losses={len(self.scalers)}, so loss_id goes from "
                f"0 to {len(self.scalers) - 1}. Pass num_losses= to initialize for more."
            )
        return self.scalers[loss_id]

    def follow_unowned(self, models: Sequence[torch.nn.Module]) -> None:
        """Know the parameters of the models that no optimizer updates: their gradients are unscaled and checked too.

        Scripts clip them together with the others, or step over them with an optimizer that `initialize` has not seen.
        """
        number = sum([len(wrapper.gradients.slots) for wrapper in watched])
        if number != self._number_owned:
            self._number_owned = number
            owned = {slot.param for wrapper in watched for slot in wrapper.gradients.slots}
            self.unowned.forget_slots()
            params = (param for model in models for param in model.parameters())
            self.unowned.add(Slots().of([param for param in params if param not in owned], {}))

    @property
    def is_one_of_several_without_ddp(self) -> bool:
        """Whether this is one of several processes, of which none has been seen to average gradients for the script."""
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        return several and torch.distributed.get_world_size() > 1 and self.ddp() is None

    def note_forward(self) -> None:
        """Remember whether the forward pass that runs now is one of DDP's, and whether its gradients will be reduced."""
        ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
        if ddp is not None and torch.is_grad_enabled():
            self.ddp = weakref.ref(ddp)
            self._runs_without_sync = not ddp.require_backward_grad_sync

    def backward_was_local(self) -> bool:
        """Whether the gradients of the backward pass that just ran were left unreduced.

        torch's DDP decides that in its forward pass; one that decides in each backward pass says so afterwards.
        """
        local, self._runs_without_sync = self._runs_without_sync, False
        told = getattr(self.ddp(), "last_backward_was_local", None)
        return local if told is None else told

    def finish_delayed(self, wrapper: OptimizerWrapper) -> None:
        """A step while gradients still wait after ``delay_unscale=True``: end the iteration as ``scale_loss`` would have."""
        scaler = wrapper.delayed_with or self.scalers[0]
        collect([wrapper], [], scaler, wrapper.gradients.delayed_scale, unowned=self._unowned_delayed)

    @property
    def _unowned_delayed(self) -> list[Gradients]:
        return [self.unowned] if self.unowned.delayed_scale is not None else []

    def unscale(self, wrapper: OptimizerWrapper, scaler: LossScaler) -> FoundInf | None:
        """Unscale gradients that wait in ``.grad``, and check them without ending the iteration; None where nothing is checked."""
        wrapper.gradients.clipping.refuse_unseen_writes()
        wrapper.findings.drop_cleared()
        scale = wrapper.gradients.delayed_scale
        if scale is None:
            return None
        found = None if scaler.is_one else new_finding([wrapper], scaler)
        for gradients in (wrapper.gradients, *self._unowned_delayed):
            gradients.collect(BackwardPass(scale, exact_in_place=scaler.is_power_of_two), found)
        if found is not None:
            _combine(found, [wrapper])
            _drop_overflowed([self.unowned], found)
        return found

    def end_iteration(self, found: Sequence[tuple[OptimizerWrapper, FoundInf]], scaler: LossScaler) -> None:
        """The scale moves by what was found in any of these optimizers' gradients; an overflow is reported."""
        ended = found[0][1]
        if len(found) > 1:
            ended = FoundInf(torch.stack([on(one.flag, ended.flag.device) for _, one in found]).amax(0))
        scaler.update(ended)
        if _CHECKS_RANKS:
            _check_ranks(scaler, [wrapper for wrapper, _ in found])
        if any(wrapper.findings.skipped for wrapper, _ in found):
            scaler.report(wait=True)

    def synchronize(self) -> None:
        """Wait for every iteration, and log the skipped ones. Nothing is raised: the next block will."""
        for scaler in self.scalers:
            scaler.report(wait=True, raises=False)

    def catch_up(self) -> None:
        """Log what the host has learned of by now, without waiting."""
        for scaler in self.scalers:
            scaler.report()


def collect(
    named: Sequence[OptimizerWrapper],
    unnamed: Sequence[OptimizerWrapper],
    scaler: LossScaler,
    scale: float | torch.Tensor,
    was_reached: Callable[[torch.Tensor], bool] | None = None,
    local: bool = False,
    delay_overflow_check: bool = False,
    loss: torch.Tensor | None = None,
    unowned: Sequence[Gradients] = (),
) -> None:
    """Unscale and check the gradients of these optimizers, and of no optimizer, which come from this loss, and end the iteration.

    What is found in gradients of an unnamed optimizer skips its own step, and moves no scale.
    """
    # What blocks with delay_overflow_check=True found belongs to this iteration.
    found = None if scaler.is_one else scaler.delayed_check or new_finding(named, scaler)
    if found is not None and loss is not None:
        found.loss = loss.detach()
    done: set[Slot] | None = set() if unnamed or len(named) > 1 else None
    backward = BackwardPass(scale, local, scaler.is_power_of_two, done, was_reached)
    for gradients in unowned:
        gradients.collect(backward, found)
    for wrapper in named:
        wrapper.gradients.collect(backward, found)
        wrapper.findings.add(found)
    for wrapper in unnamed:
        gradients = wrapper.gradients
        # Processes that agree on what was found must all ask.
        if not (gradients.has_fresh or gradients.process_groups):
            gradients.put_back(backward)
            continue
        own = None if found is None else new_finding(named)
        gradients.collect(backward, own)
        if own is not None:
            _combine(own, [wrapper])
        wrapper.findings.add(own)
    if found is None:
        return
    _combine(found, named)
    _drop_overflowed(unowned, found)
    if delay_overflow_check:
        scaler.delayed_check = found
        return
    scaler.update(found, moves_scale=not local)
    if _CHECKS_RANKS:
        _check_ranks(scaler, named)


def new_finding(wrappers: Sequence[OptimizerWrapper], scaler: LossScaler | None = None) -> FoundInf:
    """For the gradients of one block: nothing found yet."""
    flag = constant(0.0, torch.float32, home_of(wrappers)).clone()
    return FoundInf(flag, scaler, wrappers[0].owner.name_of)


def _combine(found: FoundInf, wrappers: Sequence[OptimizerWrapper]) -> None:
    """What any process has found is found by all of them: they step together or not at all."""
    groups = [group for wrapper in wrappers for group in wrapper.gradients.process_groups]
    if groups:
        highest(found.flag, dict.fromkeys(groups))


def _drop_overflowed(unowned: Sequence[Gradients], found: FoundInf) -> None:
    """Gradients that no optimizer clears would stay inf or NaN for good."""
    for gradients in unowned:
        if not is_known_clean(found.flag):
            gradients.zero_where(found.flag)


def _check_ranks(scaler: LossScaler, wrappers: Sequence[OptimizerWrapper]) -> None:
    """Raise where the processes do not agree on the loss scale: they would train apart from here on."""
    groups = dict.fromkeys(group for wrapper in wrappers for group in wrapper.gradients.process_groups)
    if not groups and torch.distributed.is_available() and torch.distributed.is_initialized():
        groups = {torch.distributed.group.WORLD: None}  # DDP's
    scale = scaler.loss_scale
    bounds = torch.tensor([scale, -scale], device=home_of(wrappers))
    highest(bounds, groups)
    if bounds.sum() != 0.0:
        raise LossScaleError(
            f"The loss scales of the processes differ: {-bounds[1].item():g} to {bounds[0].item():g}, {scale:g} here. "
            "One of them has met an overflow that the others do not know of. Where gradients are averaged by hand, pass "
            "process_group= to initialize()."
        )


def home_of(wrappers: Sequence[OptimizerWrapper]) -> torch.device:
    """Where the loss scale of these optimizers lives."""
    for wrapper in wrappers:  # not next(...): asked in every iteration
        if wrapper.gradients.slots:
            break
    return wrapper.gradients.device
