"""The loss scaling of one session: its scalers, and what happens around every backward pass.

On entry to `LossScaling.scale_loss` gradients are set aside; on exit they are checked and collected in one pass, the loss
scale moves on its device, and the verdict is handed to the optimizers. Fused optimizers take it on the device, others read it
at their next step. What nobody has read is reported at a later `scale_loss`, when it has reached the host by itself.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from ..casting.engine import active_casting
from ..errors import ConfigurationError, LossIdError, LossScaleError, NotInitializedError
from ..logs import logger
from ..optimizers.scales import on
from ..sharding import highest
from .found_inf import Bystander, Check, Verdict
from .gradients import LISTS_OF_A_COLLECTION
from .loss_scale import DynamicLossScale, DynamicScaler, LossScaler, StaticScaler
from .master_weights import Slot
from .optimizer_wrapper import OptimizerWrapper

SKIPS_BEFORE_DIAGNOSIS = 25
_CHECKS_RANKS = os.environ.get("AMPKIT_CHECK_RANKS") == "1"


class Settings(Protocol):
    """What of a session's plan matters here."""

    enabled: bool
    loss_scale: float | DynamicLossScale
    num_losses: int
    min_loss_scale: float
    max_loss_scale: float
    master_weights: bool
    on_floor: str


class LossScaling:
    """One loss scaler per loss, and the steps of an iteration that they take part in."""

    def __init__(self, plan: Settings) -> None:
        self._plan = plan
        self.scalers: list[LossScaler] = [_make_scaler(plan) for _ in range(plan.num_losses if plan.enabled else 0)]
        for loss_id, scaler in enumerate(self.scalers):
            scaler.loss_id = loss_id
        self._ddp: weakref.ref[DistributedDataParallel] | None = None
        self._runs_without_sync = False
        self._held_scale: float | torch.Tensor | None = None  # of gradients that FSDP2 has yet to reduce
        self._hopeless: LossScaleError | None = None
        self._knows_what_scripts_do = False
        self._unreported: deque[tuple[list[Verdict], Callable[[Verdict], str]]] = deque()

    def scaler(self, loss_id: int) -> LossScaler:
        """The loss scaler of a loss, 0 to ``num_losses`` - 1."""
        if isinstance(loss_id, bool) or not isinstance(loss_id, int) or not 0 <= loss_id < len(self.scalers):
            raise LossIdError(
                f"loss_id={loss_id!r} is out of range: this session has num_losses={len(self.scalers)}, so loss_id goes from "
                f"0 to {len(self.scalers) - 1}. Pass num_losses= to initialize for more."
            )
        return self.scalers[loss_id]

    @property
    def can_skip(self) -> bool:
        """Whether a step of this session may be skipped: not where every scale is a static 1.0, which checks nothing."""
        return any(self._checks(scaler) for scaler in self.scalers)

    def note_forward(self) -> None:
        """Remember whether the forward pass that runs now is one of DDP's, and whether its gradients will be reduced."""
        ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
        if ddp is not None and torch.is_grad_enabled():
            self._ddp = weakref.ref(ddp)
            self._runs_without_sync = not ddp.require_backward_grad_sync

    @contextmanager
    def scale_loss(
        self,
        loss: torch.Tensor,
        wrappers: list[OptimizerWrapper],
        scaler: LossScaler,
        delay_unscale: bool,
        delay_overflow_check: bool,
        bystanders: Sequence[OptimizerWrapper] = (),
        is_unreduced: Callable[[], bool] = lambda: False,
    ) -> Iterator[torch.Tensor]:
        """See `ampkit.scale_loss`. ``bystanders`` were not named, but the backward pass may reach their parameters.

        ``is_unreduced`` tells, after the backward pass, whether FSDP2 has kept its gradients to itself, at the scale of this
        block: nothing is to be judged then, and the following blocks stay at that scale until it has reduced them.
        """
        for wrapper in wrappers:
            if not wrapper.active:  # closed since scale_loss was called
                raise NotInitializedError(
                    f"The session of this {type(wrapper.optimizer).__name__} was closed. Call initialize() again, or leave out "
                    "scale_loss."
                )
        self._report_known()
        # From here on autograd keeps the casts of weights that the backward pass needs, and frees each when it is done with it.
        _end_of_casts(delay_unscale, before_backward=True)
        if not self._checks(scaler) and not self._plan.master_weights:
            try:
                yield loss.float()
            finally:
                _end_of_casts(delay_unscale)
            return
        home = _home(wrappers)
        scale = scaler.current(home) if self._held_scale is None else self._held_scale
        scaled = loss.float() * on(scale, loss.device)
        passed: list[torch.Tensor] = []
        watches = scaled.requires_grad and not self._knows_what_scripts_do
        if watches:
            scaled.register_hook(passed.append)
        bystanders = [wrapper for wrapper in bystanders if not wrapper.gradients.is_open]
        self._open(wrappers, bystanders, scale)
        try:
            yield scaled
        except BaseException:
            handled: set[Slot] = set()
            for wrapper in (*wrappers, *_still_open(bystanders)):
                wrapper.gradients.put_back(scale, handled)
            _end_of_casts(keep=False)
            raise
        if watches:
            self._knows_what_scripts_do = bool(passed) or self._warns_of_unscaled(wrappers)
        local = self._backward_was_local()
        bystanders = _still_open(bystanders)
        unreduced = is_unreduced()
        self._held_scale = scale if unreduced else None
        if unreduced and not delay_unscale:
            for wrapper in (*wrappers, *bystanders):
                wrapper.gradients.put_back(scale)
        elif delay_unscale:
            for wrapper in (*wrappers, *bystanders):
                if wrapper in bystanders and not wrapper.gradients.has_fresh:
                    wrapper.gradients.put_back(scale)
                else:
                    wrapper.gradients.keep_scaled(scale)
                    wrapper.delayed_with = scaler
        else:
            done: set[Slot] | None = set() if bystanders or len(wrappers) > 1 else None
            reached = _Reached(scaled)
            self._collect(wrappers, scaler, scale, home, done, reached, local, delay_overflow_check)
            self._collect_for_bystanders(bystanders, scaler, scale, home, done, reached, local)
        _end_of_casts(delay_unscale)

    def _warns_of_unscaled(self, wrappers: list[OptimizerWrapper]) -> bool:
        """Whether gradients came from something else than the scaled loss: they will be divided by the scale. Says so."""
        arrived = any(
            slot.param.grad is not None
            for wrapper in wrappers
            if not wrapper.gradients.stays
            for slot in wrapper.gradients.slots
        )
        if arrived:
            logger.warning(
                "The backward pass inside this scale_loss block did not go through the scaled loss, so that its gradients are "
                "divided by a loss scale that they were never multiplied by. Call backward() on what the block yields: "
                "'with ampkit.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()'."
            )
        return arrived

    def _backward_was_local(self) -> bool:
        """Whether the gradients of the backward pass that just ran were left unreduced.

        torch's DDP decides that in its forward pass; one that decides in each backward pass says so afterwards.
        """
        local, self._runs_without_sync = self._runs_without_sync, False
        told = getattr(self._ddp() if self._ddp is not None else None, "last_backward_was_local", None)
        return local if told is None else told

    def finish_delayed(self, wrapper: OptimizerWrapper) -> None:
        """A step while gradients still wait after ``delay_unscale=True``: end the iteration as ``scale_loss`` would have."""
        scaler = wrapper.delayed_with or self.scalers[0]
        self._collect([wrapper], scaler, wrapper.gradients.delayed_scale, _home([wrapper]))

    def unscale(self, wrapper: OptimizerWrapper, scaler: LossScaler) -> Check | None:
        """Unscale gradients that wait in ``.grad``, and check them without ending the iteration; None where nothing is checked."""
        wrapper.gradients.refuse_unseen_writes()
        wrapper.drop_cleared()
        scale = wrapper.gradients.delayed_scale
        if scale is None:
            return None
        check = Check(_home([wrapper]), LISTS_OF_A_COLLECTION) if self._checks(scaler) else None
        wrapper.gradients.collect(scale, check, exact_in_place=scaler.is_power_of_two)
        if check is not None:
            _combine(check, [wrapper])
        return check

    @staticmethod
    def end_iteration(found: Sequence[tuple[OptimizerWrapper, Check]], scaler: LossScaler) -> Verdict:
        """The scale moves as any of these optimizers' checks has found."""
        first = found[0][1]
        if len(found) == 1:
            verdict = scaler.judge(first)
        else:
            flags = [on(check.found_inf, first.found_inf.device) for _, check in found]
            verdict = scaler.judge(torch.stack(flags).amax(0))
        if _CHECKS_RANKS:
            _check_ranks(scaler, [wrapper for wrapper, _ in found])
        return verdict

    def report_skip(self, verdict: Verdict, culprit: Callable[[Verdict], str]) -> None:
        """Log a skipped step once, name the ``culprit`` when there were many, give up when it is hopeless."""
        if verdict.reported:
            return
        verdict.reported = True
        scaler, outcome = verdict.scaler, verdict.outcome
        if not verdict.moves_scale:
            logger.info(scaler.unmoved_line)
            return
        logger.info(scaler.overflow_line(outcome))
        if outcome.skips_in_a_row and outcome.skips_in_a_row % SKIPS_BEFORE_DIAGNOSIS == 0:
            logger.warning(
                "Loss scaler %d: %d steps in a row were skipped; the first parameter whose gradient is not finite is %s.",
                scaler.loss_id,
                outcome.skips_in_a_row,
                culprit(verdict),
            )
        else:
            logger.debug("The first parameter whose gradient is not finite is %s.", culprit(verdict))
        scaler.raise_if_hopeless(self._plan.on_floor, outcome)

    def report_late(self, verdicts: list[Verdict], culprit: Callable[[Verdict], str]) -> None:
        """A step was taken or skipped on the device: log a skip when the host has learned of it."""
        if not any(verdict.is_captured for verdict in verdicts):  # replays of a CUDA graph run without us
            self._unreported.append((verdicts, culprit))

    def synchronize(self) -> None:
        """Wait for every verdict, and log those that nobody has read. Nothing is raised: the next `scale_loss` will."""
        for scaler in self.scalers:
            scaler.synchronize()
        hopeless = self._hopeless
        while self._unreported:
            try:
                self._report(*self._unreported.popleft())
            except LossScaleError as error:
                hopeless = error
        self._hopeless = hopeless

    def _report_known(self) -> None:
        """Log what has become known since, without waiting."""
        hopeless, self._hopeless = self._hopeless, None
        if hopeless is not None:
            raise hopeless
        while self._unreported and all(verdict.is_known for verdict in self._unreported[0][0]):
            self._report(*self._unreported.popleft())
        for scaler in self.scalers:
            scaler.learn_known()

    def _report(self, verdicts: list[Verdict], culprit: Callable[[Verdict], str]) -> None:
        overflows = [verdict for verdict in verdicts if verdict.overflowed]
        if overflows:
            self.report_skip(overflows[-1], culprit)

    def _checks(self, scaler: LossScaler) -> bool:
        return not scaler.is_one  # it may have been set by hand

    def _open(
        self, wrappers: Sequence[OptimizerWrapper], bystanders: Sequence[OptimizerWrapper], scale: float | torch.Tensor
    ) -> None:
        for wrapper in wrappers:
            gradients = wrapper.gradients
            if gradients.is_open and (not gradients.is_bystander or gradients.has_fresh):
                raise ConfigurationError(
                    "scale_loss was entered twice for the same optimizer, one inside the other. Leave the first block before "
                    "entering the second: gradients of several losses add up across blocks."
                )
        for wrapper in (*wrappers, *bystanders):
            wrapper.gradients.refuse_unseen_writes()
        ddp = self._ddp() if self._ddp is not None else None
        for wrapper in (*wrappers, *bystanders):
            gradients = wrapper.gradients
            if gradients.is_open:  # the block around this one did not name it
                gradients.put_back(scale)
            gradients.in_buckets = ddp is not None and ddp.gradient_as_bucket_view
            wrapper.drop_cleared()
            gradients.drop_known_overflow()
        for wrapper in wrappers:
            wrapper.gradients.open(scale)
        for wrapper in bystanders:
            wrapper.gradients.open(scale, is_bystander=True)

    def _collect(
        self,
        wrappers: Sequence[OptimizerWrapper],
        scaler: LossScaler,
        scale: float | torch.Tensor,
        home: torch.device,
        done: set[Slot] | None = None,
        reached: _Reached | None = None,
        local: bool = False,
        delay_overflow_check: bool = False,
    ) -> None:
        check = None
        if self._checks(scaler):
            # What delay_overflow_check=True passed on is in the flag already.
            check, scaler.carried = scaler.carried, None
            check = check or Check(home, LISTS_OF_A_COLLECTION * len(wrappers))
        for wrapper in wrappers:
            wrapper.gradients.collect(
                scale,
                check,
                local=local,
                exact_in_place=scaler.is_power_of_two,
                done=done,
                was_reached=reached,
            )
        if check is None:
            return
        _combine(check, wrappers)
        if delay_overflow_check:
            scaler.carried = check
            for wrapper in wrappers:
                wrapper.unchecked.append((scaler, check))
            return
        verdict = scaler.judge(check, moves_scale=not local)
        if _CHECKS_RANKS:
            _check_ranks(scaler, wrappers)
        for wrapper in wrappers:
            wrapper.verdicts.append(verdict)

    def _collect_for_bystanders(
        self,
        bystanders: Sequence[OptimizerWrapper],
        scaler: LossScaler,
        scale: float | torch.Tensor,
        home: torch.device,
        done: set[Slot] | None,
        reached: _Reached,
        local: bool,
    ) -> None:
        """Gradients that a block leaves in parameters of optimizers that it did not name: as the others, but no scale moves."""
        for wrapper in bystanders:
            check = Check(home, LISTS_OF_A_COLLECTION) if self._checks(scaler) else None
            wrapper.gradients.collect(
                scale, check, local=local, exact_in_place=scaler.is_power_of_two, done=done, was_reached=reached
            )
            if check is not None:
                _combine(check, [wrapper])
                check.end(None)
                wrapper.verdicts.append(Verdict(Bystander(), check, moves_scale=False))


def _still_open(bystanders: Sequence[OptimizerWrapper]) -> list[OptimizerWrapper]:
    """Those that no block inside of this one has named."""
    return [wrapper for wrapper in bystanders if wrapper.gradients.is_open and wrapper.gradients.is_bystander]


def _combine(check: Check, wrappers: Sequence[OptimizerWrapper]) -> None:
    """What any process has found is found by all of them: they step together or not at all."""
    highest(check.found_inf, dict.fromkeys(group for wrapper in wrappers for group in wrapper.process_groups()))


def _check_ranks(scaler: LossScaler, wrappers: Sequence[OptimizerWrapper]) -> None:
    """Raise where the processes do not agree on the loss scale: they would train apart from here on."""
    groups = dict.fromkeys(group for wrapper in wrappers for group in wrapper.process_groups())
    if not groups and torch.distributed.is_available() and torch.distributed.is_initialized():
        groups = {torch.distributed.group.WORLD: None}  # DDP's
    scale = scaler.loss_scale
    bounds = torch.tensor([scale, -scale], device=_home(wrappers))
    highest(bounds, groups)
    if bounds.sum() != 0.0:
        raise LossScaleError(
            f"The loss scales of the processes differ: {-bounds[1].item():g} to {bounds[0].item():g}, {scale:g} here. "
            "One of them has met an overflow that the others do not know of. Where gradients are averaged by hand, pass "
            "process_group= to initialize()."
        )


class _Reached:
    """Whether a backward pass came to a parameter: its graph is walked when somebody asks, which is rare."""

    def __init__(self, scaled: torch.Tensor) -> None:
        self._scaled = scaled
        self._params: set[torch.Tensor] | None = None

    def __call__(self, param: torch.Tensor) -> bool:
        if self._params is None:
            self._params = set()
            waiting = [self._scaled.grad_fn]
            seen = set(waiting)
            while waiting:
                node = waiting.pop()
                if node is None:
                    continue
                if hasattr(node, "variable"):
                    self._params.add(node.variable)
                following = {following for following, _ in node.next_functions} - seen
                seen |= following
                waiting += following
        return param in self._params


def _make_scaler(plan: Settings) -> LossScaler:
    if isinstance(plan.loss_scale, DynamicLossScale):
        return DynamicScaler(plan.loss_scale, plan.min_loss_scale, plan.max_loss_scale)
    return StaticScaler(plan.loss_scale)


def _home(wrappers: Sequence[OptimizerWrapper]) -> torch.device:
    """Where the loss scale of these optimizers lives."""
    for wrapper in wrappers:
        for slot in wrapper.gradients.slots:
            return slot.param.device
    return torch.device("cpu")


def _end_of_casts(keep: bool, before_backward: bool = False) -> None:
    casting = active_casting()
    if casting is not None and not keep:
        casting.drop_cache(before_backward)
