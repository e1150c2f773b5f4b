"""The ``with scale_loss(...)`` blocks of a session: a `Block` is one of them, `LossScaling` holds what they share.

When a block begins, it stashes the gradients of earlier blocks and yields ``loss.float() * scale``. When it ends, `collect`
unscales and checks the fresh gradients, adds the stashed ones to them, moves the scale on its device, and hands the flag to
the optimizers. Nothing in between waits for a device.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ..errors import ConfigurationError, LossIdError, LossScaleError, NotInitializedError
from ..labels import labelled
from ..optimizers.scales import Scale, on
from ..sharding import fsdp_modules, highest, unsharded_params
from .advice import Advice, watched
from .found_inf import FoundInf, constant, is_known_clean
from .gradients import Gradients
from .loss_scale import LossScaler
from .optimizer_wrapper import OptimizerWrapper, drop_casts, keep_casts_to_step
from .running_statistics import after_step
from .slots import BackwardPass, Slots

_CHECKS_RANKS = os.environ.get("AMPKIT_CHECK_RANKS") == "1"


@dataclass(eq=False)
class Block:
    """One ``with scale_loss(...)``; see `ampkit.scale_loss`.

    ``named`` wraps the optimizers that the block was given, ``unnamed`` all others of live sessions, and ``unowned`` are the
    gradients of parameters without an optimizer: a backward pass may reach these all the same. ``is_unreduced`` tells, after
    the backward pass, whether FSDP2 has kept its gradients to itself. Then nothing is checked, and the following blocks stay
    at the scale of this one until FSDP2 has reduced them.
    """

    scaling: LossScaling
    loss: torch.Tensor
    named: list[OptimizerWrapper]
    unnamed: list[OptimizerWrapper]
    unowned: list[Gradients]
    scaler: LossScaler
    delay_unscale: bool
    delay_overflow_check: bool
    is_unreduced: Callable[[], bool]
    scale: Scale = 1.0

    def backward(self, *_: object, **__: object) -> None:
        """Raise for a script that writes ``scale_loss(loss, optimizer).backward()``, as with GradScaler.scale."""
        raise TypeError(
            "scale_loss is entered by 'with', since something is to be done after the backward pass: "
            "'with ampkit.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()'."
        )

    def __enter__(self) -> torch.Tensor:
        self._wrappers = [*self.named, *self.unnamed]
        self._refuse()
        try:
            self.scaling.report_skips()
        except LossScaleError:  # a script that saves its model now saves statistics without this batch
            for wrapper in self._wrappers:
                after_step(wrapper, True)
            raise
        if self.delay_unscale:
            keep_casts_to_step(self._wrappers)
        else:  # autograd keeps those that the backward pass needs, and frees each when it is done with it
            drop_casts()
        self._scaled = scaled = self.loss.float()
        self._is_plain = self.scaler.is_one and not self.scaling.plan.master_weights
        if not self._is_plain:
            held = self.scaling.held_scale
            self.scale = self.scaler.current(home_of(self.named)) if held is None else held
            self._scaled = scaled = scaled * on(self.scale, scaled.device)
            self._stash_gradients()
            if not self.scaler.is_one:
                self.scaling.advice.before_backward(self.named, scaled, self.delay_unscale)
        for wrapper in self.named:
            wrapper.findings.scaler = self.scaler
        try:
            self._tell_wrappers(self)
            return scaled
        except BaseException:
            self._tell_wrappers(None)
            raise

    def __exit__(self, error_type: object, error: object, traceback: object) -> None:
        self._tell_wrappers(None)
        if not self._is_plain:
            if error_type is None:
                self._end()
            else:
                self._put_back(BackwardPass(self.scale, done=set()))

    def _tell_wrappers(self, block: Block | None) -> None:
        for wrapper in self._wrappers:
            wrapper.block = block

    def _refuse(self) -> None:
        """Raise for an optimizer that was closed since scale_loss was called, and for a block inside of another."""
        for wrapper in self._wrappers:
            if not wrapper.active and wrapper in self.named:
                raise NotInitializedError(
                    f"The session of this {type(wrapper.optimizer).__name__} was closed. Call initialize() again, or leave out "
                    "scale_loss."
                )
            if wrapper.block is not None:
                raise ConfigurationError(
                    "scale_loss was entered inside of another scale_loss block. Leave the first block before entering the second: "
                    "gradients of several losses add up across blocks. Of threads that train at once, each calls initialize() for "
                    "its own models and optimizers."
                )

    def _stash_gradients(self) -> None:
        """Stash the gradients that are there. No optimizer's are touched where those of one have to be refused."""
        for wrapper in self._wrappers:
            wrapper.gradients.bring_back()
            wrapper.gradients.clipping.check_writes()
            wrapper.end_loans()
        ddp = self.scaling.ddp()
        in_buckets, empty = ddp is not None and ddp.gradient_as_bucket_view, []
        for wrapper in self._wrappers:
            wrapper.gradients.in_buckets = in_buckets
            empty.append(wrapper.findings.drop_cleared())
            wrapper.findings.drop_skipped()
        for wrapper, is_empty in zip(self._wrappers, empty):  # those before may hold the same parameters
            wrapper.gradients.open(self.scale, is_empty)
        for gradients in self.unowned:
            gradients.in_buckets = in_buckets
            gradients.open(self.scale, gradients.drop_cleared())

    def _put_back(self, backward: BackwardPass) -> None:
        for wrapper in self._wrappers:
            wrapper.gradients.put_back(backward)
        for gradients in self.unowned:
            gradients.put_back(backward)

    def _end(self) -> None:
        scaling, scale = self.scaling, self.scale
        if not (self.delay_unscale or self.scaler.is_one) and self._scaled.requires_grad:
            scaling.advice.after_backward(self.named)
        is_local = scaling.backward_was_local()
        scaling.held_scale = scale if self.is_unreduced() else None
        if self.delay_unscale:
            for wrapper in self._wrappers:
                if wrapper in self.unnamed and not wrapper.gradients.has_fresh:
                    wrapper.gradients.put_back(BackwardPass(scale))
                else:
                    wrapper.gradients.keep_scaled(scale)
                    wrapper.delayed_with = self.scaler
            for gradients in self.unowned:
                gradients.keep_scaled(scale)
        elif scaling.held_scale is not None:
            self._put_back(BackwardPass(scale))
        else:
            done = set() if len(self._wrappers) > 1 else None
            backward = BackwardPass(scale, is_local, self.scaler.is_power_of_two, done)
            collect(backward, self.named, self.unnamed, self.unowned, self.scaler, self.delay_overflow_check, self.loss)
            for wrapper in self._wrappers:
                wrapper.hand_gradients()


@labelled("unscale")
def collect(
    backward: BackwardPass,
    named: Sequence[OptimizerWrapper],
    unnamed: Sequence[OptimizerWrapper],
    unowned: Sequence[Gradients],
    scaler: LossScaler,
    delay_overflow_check: bool = False,
    loss: torch.Tensor | None = None,
) -> None:
    """Unscale, check and add up the gradients that a backward pass has made, and end the iteration.

    An overflow in gradients of an unnamed optimizer skips that optimizer's step and moves no scale.
    """
    # What blocks with delay_overflow_check=True found belongs to this iteration.
    found = None if scaler.is_one else scaler.delayed_check or new_finding(named, scaler)
    for gradients in unowned:
        gradients.collect(backward, found)
    for wrapper in named:
        wrapper.gradients.collect(backward, found)
        wrapper.findings.add(found)
    for wrapper in unnamed:
        gradients = wrapper.gradients
        # Processes that step together must all ask.
        if not (gradients.has_fresh or gradients.process_groups):
            gradients.put_back(backward)
            continue
        of_unnamed = None if found is None else new_finding(named)
        gradients.collect(backward, of_unnamed)
        if of_unnamed is not None:
            _combine(of_unnamed, [wrapper])
        wrapper.findings.add(of_unnamed)
    if found is None:
        return
    if loss is not None and not is_known_clean(found.flag):
        found.loss = loss.detach()
    _combine(found, named)
    _drop_overflowed(unowned, found)
    if delay_overflow_check:
        scaler.delayed_check = found
        return
    scaler.update(found, moves_scale=not backward.local)
    if _CHECKS_RANKS:
        _check_ranks(scaler, named)


class LossScaling:
    """What the blocks of one session share, and what its GradScaler calls in their place.

    ``scalers`` has one loss scaler per loss; ``unowned`` the gradients of the models' parameters that no optimizer updates;
    ``held_scale`` the scale of gradients that FSDP2 has yet to reduce; ``ddp()`` the DDP module whose forward ran last.
    """

    def __init__(self, plan: Any) -> None:
        self.plan = plan
        bounds = (plan.min_loss_scale, plan.max_loss_scale)
        number = plan.num_losses if plan.enabled else 0
        of_apex = plan.policy.base == "apex"
        self.scalers = [
            LossScaler(plan.loss_scale, *bounds, loss_id, plan.on_floor, of_apex) for loss_id in range(number)
        ]
        self.ddp: Callable[[], DistributedDataParallel | None] = lambda: None
        self._runs_without_sync = False
        self.held_scale: Scale | None = None
        self.unowned = Gradients()
        self._number_owned = -1  # when ``unowned`` was found
        self.advice = Advice()

    def scaler(self, loss_id: int) -> LossScaler:
        """The loss scaler of a loss, 0 to ``num_losses`` - 1."""
        if isinstance(loss_id, bool) or not isinstance(loss_id, int) or not 0 <= loss_id < len(self.scalers):
            raise LossIdError(
                f"loss_id={loss_id!r} is out of range: this session has num_losses={len(self.scalers)}, so loss_id goes from "
                f"0 to {len(self.scalers) - 1}. Pass num_losses= to initialize for more."
            )
        return self.scalers[loss_id]

    def find_unowned(self, session: Any) -> None:
        """Find the parameters of the session's models that no optimizer updates: their gradients are unscaled and checked too.

        Scripts clip them together with the others, or step over them with an optimizer that `initialize` has not seen.
        """
        number = sum([len(wrapper.gradients.slots) for wrapper in watched()])
        if number != self._number_owned:
            self._number_owned = number
            owned = {slot.param for wrapper in watched() for slot in wrapper.gradients.slots}
            # FSDP2 has put what it gathered in the places of the optimizer's parameters, and reduces their gradients itself.
            owned.update(
                param for model in session.models for one in fsdp_modules(model) for param in unsharded_params(one)
            )
            self.unowned.forget_slots()
            params = (param for model in session.models for param in model.parameters())
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
        was_local, self._runs_without_sync = self._runs_without_sync, False
        said = getattr(self.ddp(), "last_backward_was_local", None)
        return was_local if said is None else said

    def finish_delayed(self, wrapper: OptimizerWrapper) -> None:
        """At a step, while gradients wait after ``delay_unscale=True``: end the iteration as a block would have."""
        scaler = wrapper.delayed_with or self.scalers[0]
        backward = BackwardPass(wrapper.gradients.delayed_scale, exact_in_place=scaler.is_power_of_two)
        collect(backward, [wrapper], [], self._unowned_delayed, scaler)

    @property
    def _unowned_delayed(self) -> list[Gradients]:
        return [self.unowned] if self.unowned.delayed_scale is not None else []

    def unscale(self, wrapper: OptimizerWrapper, scaler: LossScaler) -> FoundInf | None:
        """Unscale gradients that wait in ``.grad``, and check them without ending the iteration; None where nothing is checked."""
        wrapper.gradients.clipping.check_writes()
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

    def report_skips(self) -> None:
        """Log the skips that the host has learned of by now, without waiting."""
        for scaler in self.scalers:
            scaler.report()


def new_finding(wrappers: Sequence[OptimizerWrapper], scaler: LossScaler | None = None) -> FoundInf:
    """For the gradients of one block: nothing found yet."""
    flag = constant(0.0, torch.float32, home_of(wrappers)).clone()
    return FoundInf(flag, scaler, wrappers[0].owner.name_of)


def _combine(found: FoundInf, wrappers: Sequence[OptimizerWrapper]) -> None:
    """Set the flag on every process where it is set on one: they step together or not at all."""
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
