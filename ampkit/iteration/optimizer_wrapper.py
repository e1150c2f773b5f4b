"""The wrapper that a session puts on an optimizer: its step can be skipped, and updates weights together with their rests.

It lives as long as the optimizer, which is anything with ``param_groups``, ``state``, ``step`` and ``zero_grad``.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from .. import kernels
from ..casting.engine import active_casting
from ..casting.tensors import cast_state, params_of
from ..dtypes import LOWER_PRECISION
from ..errors import AmpkitError, ConfigurationError
from ..events import begin_step, end_step, listeners
from ..logs import logger
from ..models.float32_values import value_of
from ..optimizers.fused import FusedOptimizer
from ..patching import PatchSet
from ..registry import WRAPPER_KEY, wrapper_refs
from .advice import Advice
from .found_inf import Slot
from .gradients import Findings, Gradients, State
from .stand_ins import StandIns, inner_optimizers, step_evaluating_again
from .ways import ITS_OWN, ONE_PASS, OnePassStep, Traits, Way, choose, is_known

# Bound once: asked in every step.
_compiling = torch.compiler.is_dynamo_compiling

_AMID_UPDATE = (
    "ampkit: this was raised while optimizer.step() updated weights: some may be updated and others not. To train on, load a "
    "checkpoint."
)


class OptimizerWrapper:
    """The wrapper of an optimizer of a session (``owner``)."""

    def __init__(self, optimizer: Any, owner: Any) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.owner = owner
        self.advice: Advice = owner.scaling.advice
        self._patches = PatchSet()
        self.active = True
        self.traits = Traits.of(optimizer)
        self.gradients = Gradients(owner.process_group)
        self.findings = Findings(self.gradients, owner)
        self.one_pass = OnePassStep(self.gradients)
        self._params: list[Tensor] = []  # of the groups, when `follow_groups` last read them
        self.has_lent = False  # whether a script may hold loans of `master_params`
        self.delayed_with: Any = None  # the scaler of gradients that wait at its scale
        try:
            self._know_params(params_of(optimizer))
            self.stand_ins = StandIns(optimizer, self.gradients)
            self._patches.set(optimizer, WRAPPER_KEY, self)
            for name, method in (
                ("step", self._step),
                ("zero_grad", self._zero_grad),
                ("add_param_group", self._add_param_group),
                ("load_state_dict", self._load_state_dict),
            ):
                if hasattr(optimizer, name):
                    self._replace(optimizer, name, method)
            for inner in inner_optimizers(optimizer):
                self._replace(inner, "step", self._step_of_inner)
                if hasattr(inner, "load_state_dict"):
                    self._replace(inner, "load_state_dict", self._load_state_dict)
            if isinstance(optimizer, FusedOptimizer):
                optimizer.hooks.follow(optimizer, none=True)  # the session checks gradients
            wrapper_refs.append(weakref.ref(self, wrapper_refs.remove))
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Restore the optimizer's methods, and leave its state in float32. Weights are restored with the models."""
        if self.gradients.state is not State.IN_BLOCK:
            self.settle(refuses=False)
            if self.gradients.clip is not None:
                self.gradients.widen()
            self.findings.zero_skipped(closes=True)
            self.one_pass.give_counts_back(self.optimizer())
        self.active = False
        wrapper_refs[:] = [ref for ref in wrapper_refs if ref() is not self]
        self._patches.restore()
        if isinstance(optimizer := self.optimizer(), FusedOptimizer):
            optimizer.hooks.follow(optimizer)
        for state, cast in self.state_cast(torch.float32):
            state.update(cast)
        self.gradients.hold(())

    def state_cast(self, dtype: torch.dtype | None = None) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """The state of each parameter that trains in lower precision, with a cast of it to ``dtype``, or to the parameter's."""
        optimizer = self.optimizer()
        state = {} if getattr(optimizer, "keeps_float32_state", False) else optimizer.state
        return [
            (state[slot.param], cast_state(state[slot.param], dtype or slot.param.dtype))
            for slot in self.gradients.slots
            if slot.master is None and slot.param.dtype in LOWER_PRECISION and slot.param in state
        ]

    def master_params(self) -> Iterator[Tensor]:
        """Yield the parameters of the optimizer, in its order; for weights with rests yield loans of their float32 values."""
        if self.gradients.state is not State.IN_BLOCK:
            self.settle()
            self.gradients.widen()
        elif self.gradients.has_fresh:
            self.advice.tell("scaled", "master_params was asked for")
        if self.gradients.stored:
            self.gradients.stored[0].master.loans.lend_again()
        values = {slot.param: slot.master for slot in self.gradients.stored}
        for param in params_of(self.optimizer()):
            value = values.get(param)
            if value is not None:
                self.has_lent = True
                param = value.loans.lend_parameter(value, param)
            yield param

    @property
    def has_scale(self) -> bool:
        """Whether a loss of the session has another loss scale than a static 1.0."""
        return not all([scaler.is_one for scaler in self.owner.scalers])

    def note_outside(self, passes: int) -> None:
        """Note a backward pass outside of all blocks, before which `Advice.passes` was ``passes``. Warns of a sum of two scales."""
        if self.gradients.state is not State.WAITING:
            self.findings.came_through_no_block = True
        elif self.advice.passes == passes and self.owner.plan.policy.base != "apex":  # whose scripts scale by hand
            self.advice.tell("beside delayed")

    def holds_scaled(self, tensors: Sequence[Tensor]) -> bool:
        """Whether one of these is a gradient that is still scaled: in a block, or after one with ``delay_unscale=True``."""
        gradients, scale = self.gradients, self.gradients.scale
        is_scaled = gradients.state in (State.IN_BLOCK, State.WAITING)
        if not is_scaled or not gradients.has_fresh or (not isinstance(scale, Tensor) and scale == 1.0):
            return False
        return not {id(slot.param.grad) for slot in gradients.slots}.isdisjoint(map(id, tensors))

    def hand_gradients(self) -> None:
        """Give the present gradients, after a block, to lent float32 parameters that a script still holds."""
        lent = [slot for slot in self.gradients.stored if slot.master.loans.held_by_script(slot.master) is not None]
        self.has_lent = bool(lent)
        if lent:
            self.gradients.widen()
        for slot in lent:
            slot.master.loans.lend_again(slot.master)

    def settle(self, finishes: bool = True, refuses: bool = True) -> bool:
        """Bring every gradient, unscaled, to ``param.grad``, and take over writes to loans. Returns whether there are gradients.

        Without ``finishes`` gradients that wait at a scale go on waiting. ``refuses`` writes of which one would be lost.
        """
        gradients = self.gradients
        if gradients.stored:
            gradients.stored[0].master.loans.end(refuses=refuses)
            for slot in gradients.stored if finishes else ():  # no graph has these weights any more
                if slot.param.dtype is torch.float32 and not slot.master.was_made_float32:  # p.data = values
                    slot.master.take_float32(slot.param)
                    self.advice.tell("assigned", self.owner.plan.opt_level)
        if not gradients.settle(refuses):
            self.findings.drop_cleared()
            return False
        if finishes and gradients.state is State.WAITING:
            self.owner.scaling.finish_delayed(self)
        return True

    def _replace(self, optimizer: Any, name: str, method: Callable[..., Any]) -> None:
        handed_on = None if hasattr(type(optimizer), name) else getattr(optimizer, name)  # by __getattr__
        before, ref = vars(optimizer).get(name, handed_on), weakref.ref(optimizer)
        original = before if before is not None else getattr(type(optimizer), name)

        # wraps() carries over the marks that learning-rate schedulers leave on the function: they look for ``__func__``.
        @functools.wraps(original)
        def replacement(_: Any, *args: Any, **kwargs: Any) -> Any:
            call_original = original if before is not None else functools.partial(original, ref())
            if not self.active:
                return call_original(*args, **kwargs)
            # Uncompiled: kernels and the look at gradients are no part of a graph.
            run = torch._dynamo.disable(method) if _compiling() else method
            return run(call_original, *args, **kwargs)

        self._patches.set(optimizer, name, types.MethodType(replacement, optimizer))

    # The step

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.stand_ins.in_use:  # a part of the step of an optimizer around this one
            return original(*args, **kwargs)
        if self.gradients.state is State.IN_BLOCK:
            self.gradients.refuse("step")
        self.follow_groups()
        closure = args[0] if args else kwargs.get("closure")
        if callable(closure):
            kwargs.pop("closure", None)
            optimizer, args = self.optimizer(), args[1:]
            if not is_known(optimizer) or isinstance(optimizer, torch.optim.LBFGS):  # it may evaluate its closure again
                step = functools.partial(original, *args, **kwargs)
                return step_evaluating_again(self, step, closure, _casting_disabled())
            with torch.enable_grad():
                loss = closure()
            self._step_once(original, *args, **kwargs)
            return loss
        return self._step_once(original, *args, **kwargs)

    def _step_once(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        optimizer = self.optimizer()
        if listeners:
            begin_step(optimizer)
        self.settle()
        way, reason = choose(self)
        kind = type(optimizer)
        if reason is not None and self.gradients.stored and self.owner.plan.one_pass_step and kind in ONE_PASS:
            if self.advice.is_first(f"{kind.__name__} over copies: {reason}"):
                logger.info(
                    "%s.step() runs over float32 copies of the weights, which takes more time and memory than one pass: %s.",
                    *(kind.__name__, reason),
                )
        hooked = _has_hooks(optimizer)
        if hooked and self.gradients.clip is not None:
            self.gradients.widen()  # scripts look at gradients there
        with profiler.record_function("ampkit: step") if profiler._is_profiler_enabled else nullcontext():
            return self._take(way, functools.partial(original, *args, **kwargs), hooked)

    def _take(self, way: Way, step: Callable[[], Any], hooked: bool = False) -> Any:
        """Take a step, or skip it where the host knows that gradients are not finite. A device reads the flag in its step."""
        findings, flag = self.findings, None
        try:
            finding = findings.judge(self.checks_step(way))
            # With a flag a step takes longer, torch's on the CPU by a third.
            if finding is not None and not finding.is_clean:
                if way.skips_on_device and (self.traits.takes_inputs or not finding.flag.is_cpu):
                    flag = finding.flag
                elif way.skips_on_device or findings.skipped:
                    findings.report()
                    return self.end_step(skipped=True)
        except BaseException:  # a script that saves its model now saves statistics without this batch
            self.owner.statistics.keep_finite()
            raise
        try:
            with nullcontext() if way.is_one_kernel and not hooked else _casting_disabled():
                in_step = way.in_step(self, flag)
                with self.between_hooks(in_step) if hooked else in_step:
                    result = step()
            self.end_step()
            return result
        except BaseException as error:
            if not isinstance(error, AmpkitError):
                error.add_note(_AMID_UPDATE)
            raise

    def checks_step(self, way: Way | None = None) -> bool:
        """Whether a step checks gradients that no block has checked. Warns of those that came through none at a loss scale."""
        if self.findings.came_through_no_block:
            if not self.findings.new:
                self.advice.tell("outside", type(self.optimizer()).__name__)
            return True
        checks: bool | None = self.owner.plan.check_gradients
        return (way or choose(self)[0]).skips_on_device if checks is None else checks

    @contextmanager
    def between_hooks(self, in_step: AbstractContextManager[None]) -> Iterator[None]:
        """Enter ``in_step`` between the script's hooks, which see the model's own gradients and weights."""
        optimizer, depth = self.optimizer(), 0  # a step that calls its class's has the hooks of both

        def begin(*_: Any) -> None:
            nonlocal depth
            if depth == 0:
                self.settle()
                update.enter_context(in_step)
            depth += 1

        def end(*_: Any) -> None:
            nonlocal depth
            depth -= 1
            if depth == 0:
                update.close()

        last, first = optimizer.register_step_pre_hook(begin), optimizer.register_step_post_hook(end)
        optimizer._optimizer_step_post_hooks.move_to_end(first.id, last=False)
        try:
            with ExitStack() as update:
                yield
        finally:
            last.remove()
            first.remove()

    def _step_of_inner(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Take a step of an inner optimizer, as a part of the outer step, or where a script calls it (SAM's second step)."""
        if self.stand_ins.in_use or self.traits.takes_rests:
            return original(*args, **kwargs)
        if listeners:
            begin_step(self.optimizer())
        self.settle()
        return self._take(ITS_OWN, functools.partial(original, *args, **kwargs))

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the gradients by their norm, and return the norm. For weights with rests the step clips."""
        self.settle()
        norm = self.gradients.total_norm()
        if norm is None:
            return torch.zeros(())
        coefficient = kernels.clip_coefficient(norm, max_norm)
        # Where the norm is not finite the flag decides: inf times 0 would make NaN of it.
        self.gradients.clip_by(torch.where(norm.isfinite(), coefficient, torch.ones_like(coefficient)))
        if not self.gradients.process_groups:  # processes that agree all look
            self.findings.mark_checked(norm)
        return norm.reshape(())

    def end_step(self, skipped: bool = False) -> None:
        """End a step that was taken, or ``skipped`` for gradients that are not finite."""
        optimizer = self.optimizer()
        self.gradients.clip_is_used = True
        if self.gradients.stored and not skipped:
            self.gradients.stored[0].master.loans.lend_again()
        if self.owner.statistics.are_there:
            self.owner.statistics.end_step()
        if skipped or not isinstance(optimizer, torch.optim.Optimizer):  # else torch has called what drops them
            drop_casts()
        # Schedulers warn when they step before the optimizer; a skipped step is not the script's mistake.
        if skipped and getattr(optimizer.step, "_wrapped_by_lr_sched", False):
            optimizer._opt_called = True
        if listeners:
            end_step(optimizer, skipped)

    def _zero_grad(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        set_to_none = args[0] if args else kwargs.get("set_to_none", True)
        self.follow_groups()
        clears_all = self.traits.clears_as_torch and set_to_none and getattr(self.optimizer(), "set_grad_none", True)
        self.findings.forget()
        self.gradients.clear(set_to_none, clears_all=clears_all)
        if not clears_all:
            original(*args, **kwargs)
        if self.has_lent:
            self.hand_gradients()

    # The groups

    def _add_param_group(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        try:
            self._know_params(params_of(self.optimizer()))
        except ConfigurationError:  # nothing of a group that is refused stays
            del self.optimizer().param_groups[-1]
            raise
        return result

    def _load_state_dict(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Load state while float32 stand-ins replace weights with rests: torch casts state to the dtype of its parameter."""
        self.one_pass.known_counts.clear()
        with nullcontext() if self.traits.takes_rests else self.stand_ins.in_load():
            return original(*args, **kwargs)

    def follow_groups(self) -> None:
        """Hold the gradients of what a script has put into ``param_groups[i]["params"]``, and of nothing else."""
        if not (self.gradients.state is State.IN_BLOCK or self.stand_ins.in_use):
            params: list[Tensor] = []
            for group in self.optimizer().param_groups:
                if not isinstance(group["params"], list):  # a generator, which would be empty after this
                    group["params"] = list(group["params"])
                params += group["params"]
            if len(params) != len(self._params) or not all(map(is_, params, self._params)):
                self.settle()
                self._know_params(params)

    def _know_params(self, params: list[Tensor]) -> None:
        self.owner.train(params)
        known, slots = self.owner.scaling.slots, []
        for param in params:
            slot = known.get(id(param))
            if slot is None:
                value = value_of(param) if self.owner.plan.master_weights else None
                if value is not None and value.rest is None:  # made of cast weights since, by a parametrization
                    value.rest = torch.zeros_like(param, dtype=torch.int16, requires_grad=False)
                slot = known[id(param)] = Slot(param, value)
            slots.append(slot)
        self.gradients.hold(slots)
        self._params = params


def drop_casts() -> None:
    casting = active_casting()
    if casting is not None:
        casting.caches.drop()


def _casting_disabled() -> Any:
    casting = active_casting()
    return casting.disabled() if casting is not None else nullcontext()


def _has_hooks(optimizer: Any) -> bool:
    """Whether hooks of the script run before or after this optimizer's update, where gradients and weights may be written to."""
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", None) or getattr(
        optimizer, "_optimizer_step_post_hooks", None
    )
    return hooks is not None and bool(hooks or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)
