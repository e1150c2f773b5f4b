"""What a session puts on an optimizer: a step that can be skipped, and that updates weights together with their rests.

The methods are installed on the instance as bound methods, so that learning-rate schedulers find their ``__func__``; the
wrapper itself sits on the optimizer and lives as long as it does. Optimizers are anything with ``param_groups``, ``state``,
``step`` and ``zero_grad``; those that can be told on the device that a step is to be skipped are told there. FusedAdam and FusedSGD
update weight and rest in one pass, others step over stand-ins (stand_ins.py).
"""

from __future__ import annotations

import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import is_
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..casting.engine import active_casting
from ..casting.tensors import cast_state, params_of
from ..dtypes import LOWER_PRECISION
from ..errors import AmpkitError, ConfigurationError, LossScaleError
from ..labels import labelled
from ..logs import logger
from ..optimizers.fused import StepInputs
from ..optimizers.scales import is_one
from ..optimizers.traits import (
    clears_as_torch,
    evaluates_once,
    lacks_momenta,
    takes_found_inf,
    takes_rests,
    takes_step_inputs,
)
from ..patching import PatchSet
from .advice import Advice, unwatch, watch
from .found_inf import Findings, is_known_clean, is_set
from .gradients import Gradients
from .loss_scale import LossScaler
from .one_pass import OnePassStep, why_over_stand_ins
from .running_statistics import Snapshot, after_step
from .slots import WRAPPER_KEY, Slots
from .stand_ins import StandIns, inner_optimizers, step_evaluating_again

# Bound once: asked in every step.
_compiling = torch.compiler.is_dynamo_compiling
# Those of torch.optim.optimizer.register_optimizer_step_pre_hook and register_optimizer_step_post_hook.
_pre_hooks_of_all = sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
_post_hooks_of_all = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks

_AMID_UPDATE = (
    "ampkit: this was raised while optimizer.step() updated weights: some may be updated and others not. To train on, load a "
    "checkpoint."
)


class OptimizerWrapper:
    """One optimizer of a session (``owner``): slots, gradients, what was found in them, and methods in the place of its own."""

    def __init__(self, optimizer: Any, owner: Any, slots: Slots) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.owner = owner
        self._patches = PatchSet()
        self.block: Any = None  # the scale_loss block that is open, whether it names this optimizer or not
        self.delayed_with: LossScaler | None = None
        self.snapshots: list[Snapshot] = []  # of running statistics, since the last step
        self.active = True
        self._takes_step_inputs = takes_step_inputs(optimizer)
        self._takes_rests = self._takes_step_inputs and takes_rests(optimizer)
        self.gradients = Gradients(owner.process_group)
        self.findings = Findings(self.gradients, owner)
        self._clears_as_torch = clears_as_torch(optimizer)
        self._takes_found_inf = not self._takes_step_inputs and takes_found_inf(optimizer)
        self._one_pass = None
        if owner.plan.one_pass_step and OnePassStep.is_for(optimizer):
            self._one_pass = OnePassStep(optimizer, self.gradients)
        self._told_of: set[str] = set()  # why steps were taken over stand-ins
        self._slots = slots
        self._params: list[Tensor] = []  # of the groups, when they were last looked at
        self._has_lent = False  # master_params was asked for
        try:
            self._know_params(params_of(optimizer))
            self.stand_ins = StandIns(optimizer, self.gradients)
            self._patches.set(optimizer, WRAPPER_KEY, self)
            self._replace(optimizer, "step", self._step)
            self._replace(optimizer, "zero_grad", self._zero_grad)
            for name, method in (
                ("add_param_group", self._add_param_group),
                ("load_state_dict", self._load_state_dict),
            ):
                if hasattr(optimizer, name):
                    self._replace(optimizer, name, method)
            for inner in inner_optimizers(optimizer) if self.gradients.mastered else ():
                self._replace(inner, "step", self._step_of_inner)
            watch(self)
        except BaseException:
            self.detach()
            raise

    @property
    def optimizer(self) -> Any:
        return self._optimizer()

    def detach(self) -> None:
        """Give the optimizer its methods back, and state in float32. The weights are the models' business."""
        if not self.gradients.is_open:
            self.synchronize_gradients(refuses=False)
            if self.gradients.clipping.pending is not None:
                self.gradients.widen()
        self.active = False
        unwatch(self)
        self._patches.restore()
        for own, cast in self.state_cast(torch.float32):
            own.update(cast)
        self.gradients.forget_slots()

    def state_cast(self, dtype: torch.dtype | None = None) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """The state of parameters that train in lower precision, each with what it is in this dtype, or in theirs."""
        optimizer = self.optimizer
        keeps = "keeps_float32_state" if dtype is None else "keeps_narrow_state"
        state = {} if getattr(optimizer, keeps, False) else optimizer.state
        return [
            (state[slot.param], cast_state(state[slot.param], dtype or slot.param.dtype))
            for slot in self.gradients.slots
            if slot.entry is None and slot.param.dtype in LOWER_PRECISION and slot.param in state
        ]

    def master_params(self) -> Iterator[Tensor]:
        """What the optimizer updates, in its order: of weights with rests their float32 values, which are lent."""
        if not self.gradients.is_open:
            self.synchronize_gradients()
            self.gradients.widen()
        elif self.gradients.has_fresh:
            self.advice.tell("scaled", "master_params was asked for")
        if self.gradients.mastered:
            self.gradients.mastered[0].entry.loans.lend_again()
        entries = {slot.param: slot.entry for slot in self.gradients.mastered}
        for param in params_of(self.optimizer):
            entry = entries.get(param)
            if entry is not None:
                self._has_lent = True
                param = entry.loans.lend_parameter(entry, param)
            yield param

    @property
    def advice(self) -> Advice:
        """What a script is told of mistakes."""
        advice: Advice = self.owner.scaling.advice
        return advice

    @property
    def has_scale(self) -> bool:
        """Whether a loss is multiplied for it by something else than a static 1.0."""
        return not all([scaler.is_one for scaler in self.owner.scalers])

    def is_outside_of_blocks(self, thread: int) -> bool:
        """Whether a backward pass of this thread would bring gradients that come through no block."""
        is_to_look = not (self.gradients.is_open or self.findings.came_through_no_block) and self.has_scale
        return is_to_look and self.owner.thread == thread

    def has_scaled(self, params: Sequence[Tensor]) -> bool:
        """Whether the gradient of one of these is at a loss scale now: in a block, or since one with ``delay_unscale=True``."""
        delayed, block = self.gradients.delayed_scale, self.block
        waits = delayed is not None and not is_one(delayed)
        is_in_block = block is not None and self in block.named and not block.scaler.is_one
        return (waits or is_in_block) and not {slot.param for slot in self.gradients.slots}.isdisjoint(params)

    def hand_gradients(self) -> None:
        """After a block: float32 parameters that were lent, and that a script still holds, get the gradients of now."""
        if not self._has_lent:
            return
        lent = [slot for slot in self.gradients.mastered if slot.entry.loans.held_by_script(slot.entry) is not None]
        self._has_lent = bool(lent)
        if lent:
            self.gradients.widen()
        for slot in lent:
            slot.entry.loans.lend_again(slot.entry)
            slot.entry.loans.hand_gradient(slot.entry)

    def end_loans(self, refuses: bool = True) -> None:
        """Take over what was written to float32 values, and gradients, that were lent."""
        if self.gradients.mastered:
            self.gradients.mastered[0].entry.loans.end(refuses=refuses)

    def _replace(self, optimizer: Any, name: str, method: Callable[..., Any]) -> None:
        before, ref = vars(optimizer).get(name), weakref.ref(optimizer)
        original = before if before is not None else getattr(type(optimizer), name)

        def call_original(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if before is not None else original(ref(), *args, **kwargs)

        # wraps() carries over the marks that learning-rate schedulers leave on the function.
        @functools.wraps(original)
        def replacement(_: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return call_original(*args, **kwargs)
            # Uncompiled: kernels and the look at gradients are no part of a graph.
            run = torch._dynamo.disable(method) if _compiling() else method
            return run(call_original, *args, **kwargs)

        self._patches.set(optimizer, name, types.MethodType(replacement, optimizer))

    # The step

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.stand_ins.are_in_place:  # a part of the step of an optimizer around this one
            return original(*args, **kwargs)
        closure, rest = (args[0], args[1:]) if args else (kwargs.get("closure"), ())
        if self.gradients.is_open:
            raise ConfigurationError(
                "optimizer.step() was called inside the scale_loss block, where gradients are still scaled. End the block "
                "first: step() belongs on the level of `with`, not inside it."
            )
        self.follow_groups()
        if callable(closure):
            kwargs.pop("closure", None)
            if not evaluates_once(self.optimizer):
                step = functools.partial(original, *rest, **kwargs)
                return step_evaluating_again(self, step, closure, _casting_disabled())
            with torch.enable_grad():
                loss = closure()
            self._step_once(original, *rest, **kwargs)
            return loss
        return self._step_once(original, *args, **kwargs)

    @labelled("step")
    def _step_once(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        optimizer, found_inf = self.optimizer, None
        self.synchronize_gradients()
        if self.owner.thread != threading.get_ident() and self.has_scale and not self.findings.has_new:
            raise ConfigurationError(
                f"{type(optimizer).__name__}.step() was called in another thread than its session's, and no scale_loss block has "
                "named it since its last step: what blocks of this thread have left in its gradients is at their loss scale. Call "
                "initialize() once for all that trains together, or in the thread that trains."
            )
        one_pass = self._one_pass_now()
        checks = self.checks_now()
        if self.gradients.clipping.pending is not None and _has_hooks(optimizer):
            self.gradients.widen()  # scripts look at gradients there
        heeds_flag = self._takes_step_inputs or self._takes_found_inf
        try:
            if heeds_flag or (one_pass is not None and one_pass.counts_on_device(optimizer)):
                found_inf = self.findings.flag(checks)
            elif self.findings.forbid_step(checks):
                return self.skip()
        except LossScaleError:  # a script that saves its model now saves statistics without this batch
            after_step(self, True)
            raise
        if found_inf is not None and is_known_clean(found_inf):
            found_inf = None  # with a flag a step takes longer, torch's on the CPU by a third
        if self._takes_step_inputs:
            optimizer.inputs = StepInputs(
                found_inf=found_inf, total_norm=self.gradients.total_norm, around=self._updating
            )
        elif (
            found_inf is not None and self._takes_found_inf
        ):  # torch's own, to which GradScaler hands the flag like this
            if lacks_momenta(optimizer) and is_set(found_inf):
                return self.skip()
            optimizer.grad_scale, optimizer.found_inf = None, found_inf
        try:
            with self._uncast(), self._over_stand_ins(one_pass, found_inf):
                result = original(*args, **kwargs)
                after_step(self, found_inf)
            self.end_step()
            return result
        except BaseException as error:
            if not isinstance(error, AmpkitError):
                error.add_note(_AMID_UPDATE)
            raise
        finally:
            if self._takes_step_inputs:
                optimizer.inputs = None
            elif found_inf is not None and self._takes_found_inf:
                del optimizer.grad_scale, optimizer.found_inf

    def _uncast(self) -> AbstractContextManager[None]:
        """Casts off for a step. One of a single kernel, FusedAdam's, FusedSGD's or of torch's fused ones, calls nothing to cast."""
        is_one_kernel = self._takes_rests or (self._takes_found_inf and OnePassStep.is_for(self.optimizer))
        return nullcontext() if is_one_kernel and not _has_hooks(self.optimizer) else _casting_disabled()

    @contextmanager
    def _updating(self) -> Iterator[None]:
        """The update of a fused step, without the script's hooks before and after it."""
        inputs = self.optimizer.inputs
        if self._takes_rests:
            if _has_hooks(self.optimizer):
                self.synchronize_gradients()
            inputs.rests = {id(slot.param): slot.entry.rest for slot in self.gradients.mastered}
            inputs.clip = self.gradients.clipping.pending
            yield
        else:
            with self.stand_ins.in_step():
                yield

    @property
    def why_over_stand_ins(self) -> str | None:
        """Why a step of weights in lower precision runs over float32 copies of them; None where one pass updates them."""
        return (
            None
            if self._takes_rests
            else why_over_stand_ins(self.optimizer, self.gradients, self.owner.plan.one_pass_step)
        )

    @property
    def can_skip(self) -> bool:
        """Whether a step may be skipped: not where every scale is a static 1.0, and no step looks at gradients."""
        return self.checks_step or self.has_scale

    @property
    def checks_step(self) -> bool:
        """Whether a step looks at gradients that no block has checked, as at loss scale 1."""
        checks: bool | None = self.owner.plan.check_gradients
        if checks is None:
            return self._takes_step_inputs or (self._one_pass is not None and self._may_step_in_one_pass)
        return checks

    def checks_now(self) -> bool:
        """Whether the step that begins looks at its gradients. Those that came through no block are told of."""
        if not self.findings.came_through_no_block:
            return self.checks_step
        if not self.findings.has_new:
            self.advice.tell("outside", type(self.optimizer).__name__)
        return True

    @property
    def _may_step_in_one_pass(self) -> bool:
        """Whether torch's own step is another one here: over weights with rests, or float32 weights without a loss scale."""
        return bool(self.gradients.mastered) or self.owner.plan.steps_in_one_pass

    def _one_pass_now(self) -> OnePassStep | None:
        """What has torch's optimizer update everything in one pass; None where its own step does, or where it needs stand-ins."""
        if self._one_pass is None or not self._may_step_in_one_pass:
            return None
        reason = self._one_pass.reason_against(self.optimizer)
        if reason is None:
            return self._one_pass
        if self.gradients.mastered and reason not in self._told_of:
            self._told_of.add(reason)
            logger.info(
                "%s.step() runs over float32 copies of the weights, which takes more time and memory than one pass: %s.",
                type(self.optimizer).__name__,
                reason,
            )
        return None

    def _over_stand_ins(self, one_pass: OnePassStep | None, found_inf: Tensor | None) -> AbstractContextManager[None]:
        """Have the step that follows run over stand-ins, or in ``one_pass``, where the optimizer knows nothing of rests.

        The script's hooks before the step may write to the model's gradients, and those after it look at its weights: stand-ins are
        there for the update between them alone. Optimizers that take step inputs see to it where their update begins.
        """
        if self._takes_step_inputs or (one_pass is None and not self.gradients.mastered):
            return nullcontext()
        in_step = self.stand_ins.in_step() if one_pass is None else one_pass.in_step(self.optimizer, found_inf)
        return self._between_hooks(in_step) if _has_hooks(self.optimizer) else in_step

    @contextmanager
    def _between_hooks(self, in_step: AbstractContextManager[None]) -> Iterator[None]:
        optimizer, is_entered = self.optimizer, False

        def begin(*_: Any) -> None:
            nonlocal is_entered
            self.synchronize_gradients()
            in_step.__enter__()
            is_entered = True

        def end(*_: Any) -> None:
            nonlocal is_entered
            is_entered = False
            in_step.__exit__(None, None, None)

        last, first = optimizer.register_step_pre_hook(begin), optimizer.register_step_post_hook(end)
        optimizer._optimizer_step_post_hooks.move_to_end(first.id, last=False)
        try:
            yield
        except BaseException as error:
            if is_entered:
                in_step.__exit__(type(error), error, error.__traceback__)
            raise
        finally:
            last.remove()
            first.remove()

    def _step_of_inner(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A step of an optimizer inside of this one: of the step around it, or of a script's own (SAM's second)."""
        if self.stand_ins.are_in_place or self._takes_rests:
            return original(*args, **kwargs)
        self.synchronize_gradients()
        if self.findings.forbid_step(self.checks_now()):
            return self.skip()
        with _casting_disabled(), self.stand_ins.in_step():
            result = original(*args, **kwargs)
        self.end_step()
        return result

    @labelled("clip")
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the gradients by their norm, which is returned: inside the step where the optimizer does that."""
        self.synchronize_gradients()
        norm = self.gradients.total_norm()
        if norm is None:
            return torch.zeros(())
        coefficient = kernels.clip_coefficient(norm, max_norm)
        # Where the norm is not finite the flag decides: inf times 0 would make NaN of it.
        self.gradients.clip_by(torch.where(norm.isfinite(), coefficient, torch.ones_like(coefficient)))
        if not self.gradients.process_groups:  # processes that agree all look
            self.findings.mark_checked(norm)
        return norm.reshape(())

    def end_step(self) -> None:
        """After a step that was taken."""
        self.gradients.clipping.end_step()
        if self.gradients.mastered:
            self.gradients.mastered[0].entry.loans.lend_again()
        drop_casts()

    def synchronize_gradients(self, refuses: bool = True) -> None:
        """Bring every gradient, unscaled, to ``param.grad``; take over what was written to loans."""
        if refuses:
            self.gradients.clipping.check_writes()
        self.gradients.bring_back()
        self.end_loans(refuses)
        self.findings.drop_cleared()
        if self.gradients.delayed_scale is not None:
            self.owner.scaling.finish_delayed(self)

    def skip(self) -> None:
        """In the place of a step, for gradients that are not finite."""
        after_step(self, True)
        self.findings.end_step(skipped=True)
        drop_casts()
        # Schedulers warn when they step before the optimizer; a skipped step is not the script's mistake.
        if getattr(self.optimizer.step, "_wrapped_by_lr_sched", False):
            self.optimizer._opt_called = True

    def _zero_grad(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        set_to_none = args[0] if args else kwargs.get("set_to_none", True)
        own = self._clears_as_torch and set_to_none and getattr(self.optimizer, "set_grad_none", True)
        self.findings.forget()
        self.gradients.clear(set_to_none, own=own)
        if not own:
            original(*args, **kwargs)
        self.hand_gradients()

    # The groups

    def _add_param_group(self, original: Callable[..., Any], group: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        params = group.get("params", ()) if isinstance(group, dict) else ()
        if isinstance(group, dict) and not isinstance(params, Tensor):
            group["params"] = params = list(params)
        known = {slot.param for slot in self.gradients.slots}
        for param in (params,) if isinstance(params, Tensor) else params:
            if param in known:
                raise ConfigurationError(
                    f"add_param_group: a parameter of shape {tuple(param.shape)} is in this optimizer already. Leave it out "
                    "of the new group."
                )
        result = original(group, *args, **kwargs)
        self._know_params(params_of(self.optimizer))
        return result

    def _load_state_dict(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """torch gives state the dtype of its parameter. For weights with rests that is the float32 of a stand-in."""
        if self._one_pass is not None:
            self._one_pass.known_counts.clear()
        with nullcontext() if self._takes_rests else self.stand_ins.in_groups():
            return original(*args, **kwargs)

    def follow_groups(self) -> None:
        """Give slots to parameters that a script has put into ``param_groups[i]["params"]`` since.

        What it took out keeps its slot: its gradients are unscaled like the others', and it may come back.
        """
        if not (self.gradients.is_open or self.stand_ins.are_in_place):
            params: list[Tensor] = []
            for group in self.optimizer.param_groups:
                if not isinstance(group["params"], list):  # a generator, which would be empty after this
                    group["params"] = list(group["params"])
                params += group["params"]
            if len(params) != len(self._params) or not all(map(is_, params, self._params)):
                self._know_params(params)

    def _know_params(self, params: list[Tensor]) -> None:
        self.owner.train(params)
        self.gradients.add(self._slots.of(params, self.owner.float32_values()))
        self._params = params


def wrapper_of(optimizer: Any) -> OptimizerWrapper | None:
    """The wrapper that a live session put on this optimizer, if any."""
    return getattr(optimizer, "__dict__", {}).get(WRAPPER_KEY)


def _has_hooks(optimizer: Any) -> bool:
    """Whether hooks of the script run before or after this optimizer's update, where gradients and weights may be written to."""
    own = getattr(optimizer, "_optimizer_step_pre_hooks", None) or getattr(
        optimizer, "_optimizer_step_post_hooks", None
    )
    return own is not None and bool(own or _pre_hooks_of_all or _post_hooks_of_all)


def drop_casts() -> None:
    """Forget the casts of weights."""
    casting = active_casting()
    if casting is not None:
        casting.caches.drop()


def keep_casts_to_step(wrappers: Sequence[OptimizerWrapper]) -> None:
    """Have the casts of what these optimizers hold serve further micro-batches, until `drop_casts`."""
    casting = active_casting()
    if casting is not None:
        casting.caches.keep_to_step(tuple(slot.param for one in wrappers for slot in one.gradients.slots))


def _casting_disabled() -> Any:
    casting = active_casting()
    return casting.disabled() if casting is not None else nullcontext()
