"""The loss scaling of one session: its scalers, and what happens around every backward pass.

`Block` is one ``with scale_loss(...)``. On entry gradients of earlier blocks are stashed; on exit the fresh ones are checked
and collected in one pass, the loss scale moves on its device, and the optimizers get what was found. Fused optimizers take it
on the device, others read it at their next step. A step that was skipped on the device is logged at a later `scale_loss`,
when the host has learned of it.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ..errors import ConfigurationError, LossIdError, LossScaleError, NotInitializedError
from ..logs import logger
from ..optimizers.scales import on
from ..sharding import highest
from .found_inf import FoundInf
from .gradients import LISTS_OF_A_COLLECTION
from .loss_scale import LossScaler
from .master_weights import Slot
from .optimizer_wrapper import OptimizerWrapper, drop_casts

SKIPS_BEFORE_DIAGNOSIS = 25
_CHECKS_RANKS = os.environ.get("AMPKIT_CHECK_RANKS") == "1"
_CPU = torch.device("cpu")


class LossScaling:
    """One loss scaler per loss, and the steps of an iteration that they take part in."""

    def __init__(self, plan: Any) -> None:
        self.plan = plan
        bounds = (plan.min_loss_scale, plan.max_loss_scale)
        number = plan.num_losses if plan.enabled else 0
        self.scalers = [LossScaler(plan.loss_scale, *bounds, loss_id=loss_id) for loss_id in range(number)]
        self.ddp: Callable[[], DistributedDataParallel | None] = lambda: None  # whose forward pass ran last
        self._runs_without_sync = False
        self.held_scale: float | torch.Tensor | None = None  # of gradients that FSDP2 has yet to reduce
        #: Whether a backward pass has gone through a scaled loss. Until then every block looks whether its own does.
        self.scaled_loss_was_used = False
        self.has_looked_for_hooks = False
        # What was found before steps that were skipped or taken on the device.
        self._unreported: deque[tuple[weakref.ref[OptimizerWrapper], list[FoundInf]]] = deque()
        # Found where raising would have been out of place: the next block raises it.
        self._postponed_error: LossScaleError | None = None

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
        return not all(scaler.is_one for scaler in self.scalers)

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
        collect([wrapper], [], scaler, wrapper.gradients.delayed_scale)

    @staticmethod
    def unscale(wrapper: OptimizerWrapper, scaler: LossScaler) -> FoundInf | None:
        """Unscale gradients that wait in ``.grad``, and check them without ending the iteration; None where nothing is checked."""
        wrapper.gradients.refuse_unseen_writes()
        wrapper.drop_cleared()
        scale = wrapper.gradients.delayed_scale
        if scale is None:
            return None
        found = None if scaler.is_one else scaler.found_inf(_home([wrapper]), LISTS_OF_A_COLLECTION)
        wrapper.gradients.collect(scale, found, exact_in_place=scaler.is_power_of_two)
        if found is not None:
            _combine(found, [wrapper])
        return found

    def end_iteration(self, found: Sequence[tuple[OptimizerWrapper, FoundInf]], scaler: LossScaler) -> None:
        """The scale moves by what was found in any of these optimizers' gradients; an overflow is reported."""
        ended = found[0][1]
        if len(found) > 1:
            ended = FoundInf.of(torch.stack([on(one.flag, ended.flag.device) for _, one in found]).amax(0))
        scaler.update(ended)
        if _CHECKS_RANKS:
            _check_ranks(scaler, [wrapper for wrapper, _ in found])
        skipped = next((wrapper for wrapper, _ in found if wrapper.skipped), None)
        if skipped is not None:
            self.report_skip(skipped, ended)

    # What is said of skipped steps

    def report_skip(self, wrapper: OptimizerWrapper | None, found: FoundInf) -> None:
        """Log a skipped step once. After many in a row name the parameter; raise where no scale will ever be small enough."""
        if found.reported or not found.overflowed:
            return
        found.reported = True
        scaler = found.scaler
        if found.at_step:
            logger.info(
                "Gradients were finite when the scale_loss block ended and are not at step(): it is skipped, the scale stays. "
                "Where they are averaged over processes by hand, pass process_group= to initialize()."
            )
        elif scaler is None:
            logger.info(
                "Gradient overflow in a scale_loss block that did not name this optimizer: its step is skipped, the scale stays."
            )
        elif not found.moves_scale:
            logger.info(
                "Gradient overflow under no_sync(): this step is skipped; the loss scale moves at the next sync."
            )
        else:
            logger.info(scaler.overflow_line(found))
            if found.skips_in_a_row and found.skips_in_a_row % SKIPS_BEFORE_DIAGNOSIS == 0:
                logger.warning(
                    "Loss scaler %d: %d steps in a row were skipped; the first parameter whose gradient is not finite is %s.",
                    scaler.loss_id,
                    found.skips_in_a_row,
                    _first_nonfinite(wrapper, found),
                )
            else:
                logger.debug(
                    "The first parameter whose gradient is not finite is %s.", _first_nonfinite(wrapper, found)
                )
            scaler.give_up_at_floor(self.plan.on_floor, found)

    def report_late(self, wrapper: OptimizerWrapper, found: list[FoundInf]) -> None:
        """A step was taken or skipped on the device: log a skip when the host has learned of it."""
        if not any([one.is_captured for one in found]):  # replays of a CUDA graph run without us
            self._unreported.append((weakref.ref(wrapper), found))

    def synchronize(self) -> None:
        """Wait for every iteration, and log the skipped steps among them. Nothing is raised: the next block will."""
        for scaler in self.scalers:
            scaler.synchronize()
        error = self._postponed_error
        while self._unreported:
            try:
                self._report(*self._unreported.popleft())
            except LossScaleError as newer:
                error = newer
        self._postponed_error = error

    def report_known(self) -> None:
        """Log the skipped steps that the host has learned of by now, without waiting."""
        error, self._postponed_error = self._postponed_error, None
        if error is not None:
            raise error
        for scaler in self.scalers:
            scaler.learn_known()
        while self._unreported and all([one.is_known for one in self._unreported[0][1]]):
            self._report(*self._unreported.popleft())

    def _report(self, wrapper: weakref.ref[OptimizerWrapper], found: list[FoundInf]) -> None:
        overflows = [one for one in found if one.overflowed]
        if overflows:
            self.report_skip(wrapper(), overflows[-1])


@dataclass(eq=False)
class Block:
    """One ``with scale_loss(...)``; see `ampkit.scale_loss`.

    ``unnamed`` are the optimizers that the block does not name. The backward pass may reach their parameters all the same.
    ``is_unreduced`` tells, after the backward pass, whether FSDP2 has kept its gradients to itself, at the scale of this block:
    nothing is to be judged then, and the following blocks stay at that scale until it has reduced them.
    """

    scaling: LossScaling
    loss: torch.Tensor
    named: list[OptimizerWrapper]
    unnamed: list[OptimizerWrapper]
    scaler: LossScaler
    delay_unscale: bool
    delay_overflow_check: bool
    is_unreduced: Callable[[], bool]
    is_over: bool = False
    _arrivals: list[torch.Tensor] | None = None

    def __enter__(self) -> torch.Tensor:
        for wrapper in self.named:
            if not wrapper.active:  # closed since scale_loss was called
                raise NotInitializedError(
                    f"The session of this {type(wrapper.optimizer).__name__} was closed. Call initialize() again, or leave out "
                    "scale_loss."
                )
            gradients = wrapper.gradients
            if gradients.is_open and (gradients.is_named or gradients.has_fresh):
                raise ConfigurationError(
                    "scale_loss was entered twice for the same optimizer, one inside the other. Leave the first block before "
                    "entering the second: gradients of several losses add up across blocks."
                )
        self.scaling.report_known()
        if not self.delay_unscale:
            # From here on autograd keeps the casts of weights that the backward pass needs, and frees each when it is done with it.
            drop_casts(before_backward=True)
        scaled = self.loss.float()
        self.scale: float | torch.Tensor = 1.0
        self._is_plain = self.scaler.is_one and not self.scaling.plan.master_weights
        if not self._is_plain:
            held_scale = self.scaling.held_scale
            self.scale = self.scaler.current(_home(self.named)) if held_scale is None else held_scale
            scaled = scaled * on(self.scale, scaled.device)
            if scaled.requires_grad and not self.scaling.scaled_loss_was_used:
                self._arrivals = []
                scaled.register_hook(self._arrivals.append)
            if not self.scaling.has_looked_for_hooks:
                self.scaling.has_looked_for_hooks = True
                self._warn_of_hooks()
        self.scaled = scaled
        self._enter_others()
        if not self._is_plain:
            self._open()
        for wrapper in self.named:
            wrapper.blocks.append(self)
        return scaled

    def __exit__(self, error_type: object, error: object, traceback: object) -> None:
        is_mixed = any([other.is_mixed() for other in self._others]) and error_type is None
        for wrapper in self.named:
            wrapper.blocks.remove(self)
        if not self._is_plain:
            if error_type is None and not is_mixed:
                self._end()
            else:
                handled: set[Slot] = set()
                for wrapper in (*self.named, *self.unnamed_still_open()):
                    wrapper.gradients.put_back(self.scale, handled)
        if error_type is not None or not self.delay_unscale:
            drop_casts()
        self.is_over = True
        if is_mixed:
            raise ConfigurationError(
                "Two scale_loss blocks, one inside the other, made gradients of the same parameters, each with a loss scale of "
                "its own: no one scale unscales them. Leave the first block before entering the second: gradients of several "
                "losses add up across blocks."
            )

    def _enter_others(self) -> None:
        """Blocks around this one keep what they name, and what neither names; what this one names, they give up."""
        around = dict.fromkeys(block for wrapper in self.unnamed for block in wrapper.blocks)
        self._others = [_Other(block, self) for block in around]
        self.unnamed = [one for one in self.unnamed if not (one.blocks or one.gradients.is_open)]
        self._taken = [(one, one.gradients.scale) for one in self.named if one.gradients.is_open]
        for wrapper, scale in self._taken:
            wrapper.gradients.put_back(scale)

    def give_back_taken(self) -> None:
        """A backward pass of a block around this one begins, after this one: it may come to what this one names."""
        for wrapper, scale in self._taken:
            if wrapper.active and not wrapper.gradients.is_open:
                wrapper.gradients.open(scale, is_named=False)

    def _open(self) -> None:
        """Stash the gradients that are there. Nothing is touched where an optimizer has to be refused."""
        wrappers = [*self.named, *self.unnamed]
        for wrapper in wrappers:
            wrapper.gradients.refuse_unseen_writes()
        ddp, empty = self.scaling.ddp(), []
        for wrapper in wrappers:
            gradients = wrapper.gradients
            gradients.in_buckets = ddp is not None and ddp.gradient_as_bucket_view
            empty.append(wrapper.drop_cleared())
            gradients.drop_known_overflow()
        for wrapper, is_empty in zip(wrappers, empty):  # those before may hold the same parameters
            wrapper.gradients.open(self.scale, wrapper in self.named, is_empty)

    def _end(self) -> None:
        scaling, scaler, scale = self.scaling, self.scaler, self.scale
        if self._arrivals is not None:
            scaling.scaled_loss_was_used = bool(self._arrivals) or self._warn_of_unscaled()
        local = scaling.backward_was_local()
        unnamed = self.unnamed_still_open()
        unreduced = self.is_unreduced()
        scaling.held_scale = scale if unreduced else None
        if unreduced and not self.delay_unscale:
            for wrapper in (*self.named, *unnamed):
                wrapper.gradients.put_back(scale)
            return
        if not self.delay_unscale:
            collect(self.named, unnamed, scaler, scale, _Reached(self.scaled), local, self.delay_overflow_check)
            return
        for wrapper in (*self.named, *unnamed):
            if wrapper in unnamed and not wrapper.gradients.has_fresh:
                wrapper.gradients.put_back(scale)
            else:
                wrapper.gradients.keep_scaled(scale)
                wrapper.delayed_with = scaler

    def unnamed_still_open(self) -> list[OptimizerWrapper]:
        """Those that no block inside of this one has named."""
        return [one for one in self.unnamed if one.gradients.is_open and not one.gradients.is_named]

    def _warn_of_hooks(self) -> None:
        """Say it if a script's hook on a parameter will see gradients at the loss scale, where a clamp clamps nearly all."""
        if self.scaler.is_one:
            return
        for wrapper in self.named:
            for slot in wrapper.gradients.slots:
                if _has_hook_of_script(slot.param):
                    logger.warning(
                        "Parameter %s has a hook on its gradient, which runs in the backward pass and sees the gradient multiplied "
                        "by the loss scale. Multiplying by a mask is right there, a clamp, a threshold or a statistic is not: do "
                        "these to p.grad after the scale_loss block, where it is unscaled, or train in bfloat16 at loss_scale=1.",
                        wrapper.owner.name_of(slot.param),
                    )
                    return

    def _warn_of_unscaled(self) -> bool:
        """Whether gradients came from something else than the scaled loss: they will be divided by the scale. Says so."""
        arrived = any(
            slot.param.grad is not None
            for wrapper in self.named
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


def _has_hook_of_script(param: torch.Tensor) -> bool:
    """Whether hooks other than torch's and ours are on a parameter: what averages gradients is right at any scale."""
    for hooks in (param._backward_hooks, param._post_accumulate_grad_hooks):
        for hook in (hooks or {}).values():
            while isinstance(hook, functools.partial):
                hook = hook.func
            if (getattr(hook, "__module__", None) or "").partition(".")[0] not in ("torch", "ampkit", "horovod"):
                return True
    return False


class _Other:
    """A block around another, which finds out whether their gradients meet."""

    def __init__(self, outer: Block, inner: Block) -> None:
        self._outer, self._inner = outer, inner
        self._passes: list[None] = []  # backward passes of the outer's loss inside of the inner block
        if outer.scaled.requires_grad:
            outer.scaled.register_hook(self._before_pass_of_outer)

    def _before_pass_of_outer(self, _: torch.Tensor) -> None:
        if not self._inner.is_over:
            self._passes.append(None)
        elif not self._outer.is_over:
            self._inner.give_back_taken()

    def is_mixed(self) -> bool:
        """Whether parameters that one of them unscales have got gradients of the other, at another scale."""
        outer, inner = self._outer, self._inner
        if outer.scale is inner.scale:
            return False
        has_met = _Reached(inner.scaled).any_of([*outer.named, *outer.unnamed_still_open()])
        if not has_met and self._passes:
            has_met = _Reached(outer.scaled).any_of([*inner.named, *inner.unnamed])
        return has_met and float(outer.scale) != float(inner.scale)


def collect(
    named: Sequence[OptimizerWrapper],
    unnamed: Sequence[OptimizerWrapper],
    scaler: LossScaler,
    scale: float | torch.Tensor,
    was_reached: _Reached | None = None,
    local: bool = False,
    delay_overflow_check: bool = False,
) -> None:
    """Unscale and check the gradients of these optimizers, and end the iteration.

    What is found in gradients of an unnamed optimizer skips its own step, and moves no scale.
    """
    found, home = None, _home(named)
    if not scaler.is_one:
        # What blocks with delay_overflow_check=True found belongs to this iteration.
        found, scaler.delayed_check = scaler.delayed_check, None
        found = found or scaler.found_inf(home, LISTS_OF_A_COLLECTION * len(named))
    done: set[Slot] | None = set() if unnamed or len(named) > 1 else None
    exact_in_place = scaler.is_power_of_two
    for wrapper in named:
        wrapper.gradients.collect(scale, found, local, exact_in_place, done, was_reached)
    for wrapper in unnamed:
        gradients = wrapper.gradients
        # Processes that agree on what was found must all ask.
        if not (gradients.has_fresh or wrapper.process_groups()):
            gradients.put_back(scale, done, was_reached)
            continue
        own = None if found is None else scaler.found_inf(home, LISTS_OF_A_COLLECTION)
        gradients.collect(scale, own, local, exact_in_place, done, was_reached)
        if own is not None:
            _combine(own, [wrapper])
            own.send()
            wrapper.found.append(own)
    if found is None:
        return
    _combine(found, named)
    if delay_overflow_check:
        scaler.delayed_check = found
        for wrapper in named:
            wrapper.delayed_checks.append((scaler, found))
        return
    scaler.update(found, moves_scale=not local)
    if _CHECKS_RANKS:
        _check_ranks(scaler, named)
    for wrapper in named:
        wrapper.found.append(found)


def _combine(found: FoundInf, wrappers: Sequence[OptimizerWrapper]) -> None:
    """What any process has found is found by all of them: they step together or not at all."""
    groups = [group for wrapper in wrappers for group in wrapper.process_groups()]
    if groups:
        highest(found.flag, dict.fromkeys(groups))


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

    def any_of(self, wrappers: Iterable[OptimizerWrapper]) -> bool:
        """Whether it came to a parameter of these."""
        return any(self(slot.param) for wrapper in wrappers for slot in wrapper.gradients.slots)


def _first_nonfinite(wrapper: OptimizerWrapper | None, found: FoundInf) -> str:
    """The name of the first parameter, in the optimizer's order, whose gradient was not finite."""
    if wrapper is None:
        return "not found (its optimizer is gone)"
    among = set(found.first_nonfinite)
    first = next((slot.param for slot in wrapper.gradients.slots if slot.param in among), None)
    return wrapper.owner.name_of(wrapper.gradients.first_non_finite() if first is None else first)


def _home(wrappers: Sequence[OptimizerWrapper]) -> torch.device:
    """Where the loss scale of these optimizers lives."""
    for wrapper in wrappers:  # not next(...): asked in every iteration
        if wrapper.gradients.slots:
            return wrapper.gradients.slots[0].param.device
    return _CPU
