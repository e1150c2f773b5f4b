"""What a session puts on an optimizer: a step that can be skipped, and masters kept in step with the model.

The methods are installed on the instance as bound methods, so that learning-rate schedulers find their ``__func__``; the
wrapper itself sits on the optimizer and lives as long as it does. Optimizers are anything with ``param_groups``, ``state``,
``step`` and ``zero_grad``; those that can be told on the device that a step is to be skipped are told there.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from .. import kernels
from ..casting.engine import active_casting
from ..errors import ConfigurationError
from ..logs import logger
from ..models.float32_values import write_lower
from ..optimizers.fused import StepInputs
from ..patching import PatchSet
from .evaluating_again import step_evaluating_again
from .findings import Findings
from .found_inf import FoundInf
from .gradients import Gradients
from .held_parameters import FirstSteps, HeldParameters, StateCasts
from .loss_scale import LossScaler
from .master_weights import Slot, Slots
from .optimizer_traits import clears_as_torch, evaluates_once, takes_found_inf, takes_step_inputs
from .running_statistics import Snapshot, after_step

# Bound once: asked in every step.
_compiling = torch.compiler.is_dynamo_compiling
# Those of torch.optim.optimizer.register_optimizer_step_pre_hook and register_optimizer_step_post_hook.
_pre_hooks_of_all = sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
_post_hooks_of_all = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks

WRAPPER_KEY = "_ampkit"


class OptimizerWrapper:
    """One optimizer of a session (``owner``): slots, gradients, what was found in them, and methods in the place of its own."""

    def __init__(self, optimizer: Any, owner: Any, slots: Slots) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.owner = owner
        self._patches = PatchSet()
        self.blocks: list[Any] = []  # the scale_loss blocks that are open and name this optimizer
        self.thread: int | None = None  # that has entered the last of them
        self.delayed_with: LossScaler | None = None
        self.snapshots: list[Snapshot] = []  # of running statistics, since the last step
        self.active = True
        self._has_warned_of_scaled = False
        self._takes_step_inputs = takes_step_inputs(optimizer)
        leaves_scaled = owner.plan.model_grads == "scaled"
        self.gradients = Gradients(self._takes_step_inputs, leaves_scaled, owner.process_group)
        self.findings = Findings(self.gradients, owner)
        self._clears_as_torch = clears_as_torch(optimizer)
        self._takes_found_inf = not self._takes_step_inputs and takes_found_inf(optimizer)
        self._splits = slots.splits
        self._held = HeldParameters(slots, self.gradients, owner.float32_values)
        self._lent: set[Slot] = set()  # since the last step
        try:
            if self._splits and not self._takes_step_inputs:
                raise ConfigurationError(
                    f"The step of this {type(optimizer).__name__} is not its own any more, as where a learning-rate scheduler "
                    "was made before initialize(), and split masters are updated by that alone. Make the scheduler after "
                    "initialize(), or use master_weights=True."
                )
            self._held.put_masters(optimizer)
            self.first_steps = FirstSteps(optimizer)
            self._patches.set(optimizer, WRAPPER_KEY, self)
            self._replace(optimizer, "step", self._step)
            self._replace(optimizer, "zero_grad", self._zero_grad)
            if hasattr(optimizer, "add_param_group"):
                self._replace(optimizer, "add_param_group", self._add_param_group)
        except BaseException:
            self.detach()
            raise

    @property
    def optimizer(self) -> Any:
        return self._optimizer()

    def trains_beside(self, thread: int) -> bool:
        """Whether another thread than this one trains it: the gradients that it has at the moment are that one's alone."""
        return self.thread not in (None, thread) and any(one.ident == self.thread for one in threading.enumerate())

    def detach(self) -> None:
        """Give the optimizer its parameters and methods back; parameters become float32 with their masters' values."""
        optimizer = self.optimizer
        for slot in self.gradients.mastered:
            gradient = slot.param.grad
            if gradient is not None and gradient.shape != slot.param.shape:  # since ``p.data = ...``
                slot.param.grad = None
                slot.clear()
        if not self.gradients.is_open:
            self._settle(refuses=False)
        self._end_lending()
        self.active = False
        self._patches.restore()
        self._held.put_params_back(optimizer)
        for own, cast in self._held.state_cast(optimizer, torch.float32):
            own.update(cast)
        for slot in self.gradients.mastered:
            slot.entry.synchronize(slot.param)
            slot.param.grad = None
            slot.param.data = slot.entry.current(slot.param) if slot.is_split else slot.master.data
            gradient = slot.master.raw_grad
            # Not where the weight has another shape since (``p.data = ...``).
            slot.param.grad = None if gradient is None or gradient.shape != slot.param.shape else gradient
        self.gradients.forget_slots()

    def matched_state(self) -> StateCasts:
        """State that came with a parameter which now trains in lower precision, in its dtype, as fresh state would be."""
        return [] if getattr(self.optimizer, "keeps_float32_state", False) else self._held.state_cast(self.optimizer)

    def split_masters(self) -> None:
        """Let go of the float32 values of split masters: last of all, since until then what failed is undone exactly."""
        for slot in self.gradients.mastered:
            slot.split()

    def master_params(self) -> Iterator[torch.Tensor]:
        """What the optimizer updates, in its order: masters that are split as float32 values, one at a time."""
        if not self.gradients.is_open:
            self.synchronize_gradients()
        elif self.gradients.has_fresh and not self._has_warned_of_scaled:
            self._has_warned_of_scaled = True
            logger.warning(
                "master_params was asked for inside the scale_loss block, where gradients are still multiplied by the loss scale "
                "and master weights have none yet: clipping there does not clip what the step uses. Do it after the block, on the "
                "level of `with`."
            )
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                slot = self.gradients.by_master.get(id(param))
                if slot is not None and slot.is_split:
                    self._lent.add(slot)
                    yield from slot.master.lend(slot)
                else:
                    yield param

    def _end_lending(self) -> None:
        """After a step: what is lent out are old values."""
        lent, self._lent = self._lent, set()
        for slot in lent:
            slot.master.end_step()
            slot.entry.rest.lender = None

    def write_masters_to_model(self, everything: bool = False) -> None:
        """Round every master that was written to since it last agreed with the model's weight into that weight.

        ``everything`` is for masters that were written to without torch counting it, through ``.data``.
        """
        if self._splits:
            return
        stale = [
            slot
            for slot in self.gradients.mastered
            if everything or slot.master.raw_grad is not None or slot.master._version != slot.entry.value_version
        ]
        _round_into_model(stale)

    def _written_masters(self) -> list[Slot]:
        """Those that were written to since they agreed with the model's weights, as far as torch counts."""
        return [slot for slot in self.gradients.mastered if slot.master._version != slot.entry.value_version]

    def _replace(self, optimizer: Any, name: str, method: Callable[..., Any]) -> None:
        before = vars(optimizer).get(name)
        original = before if before is not None else getattr(type(optimizer), name)

        def call_original(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if before is not None else original(self.optimizer, *args, **kwargs)

        # wraps() carries over the marks that learning-rate schedulers leave on the function.
        @functools.wraps(original)
        def replacement(_: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return call_original(*args, **kwargs)
            # Uncompiled: it asks version counters for who wrote last, and a graph cannot.
            run = torch._dynamo.disable(method) if _compiling() else method
            return run(call_original, *args, **kwargs)

        self._patches.set(optimizer, name, types.MethodType(replacement, optimizer))

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        closure, rest = (args[0], args[1:]) if args else (kwargs.get("closure"), ())
        if self.gradients.is_open:
            raise ConfigurationError(
                "optimizer.step() was called inside the scale_loss block, where gradients are still scaled. End the block "
                "first: step() belongs on the level of `with`, not inside it."
            )
        self.follow_groups()
        self._held.bring_state_to_masters(self.optimizer)
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

    def _step_once(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._takes_step_inputs:
            return self._step_on_device(original, args, kwargs)
        optimizer, found_inf = self.optimizer, None
        hooked = _has_hooks(optimizer)
        self.synchronize_gradients(for_fused_step=hooked)  # hooks may write to the model's gradients
        if self._takes_found_inf:  # torch's own fused optimizers, to which GradScaler hands the flag like this
            found_inf = self.findings.flag(unless_clean=True)  # with a flag it takes longer, on the CPU by a third
            optimizer.grad_scale, optimizer.found_inf = None, found_inf
        elif overflows := self.findings.overflows():
            return self.skip(overflows)
        self.first_steps.begin(self.gradients.slots)
        try:
            with _casting_disabled(), self._between_hooks() if hooked else nullcontext():
                result = original(*args, **kwargs)
                after_step(self.snapshots, found_inf)
        finally:
            if self._takes_found_inf:
                del optimizer.grad_scale, optimizer.found_inf
        self.end_step(is_written=hooked)
        return result

    @contextmanager
    def _between_hooks(self) -> Iterator[None]:
        """Have gradients reach masters after the script's hooks before the update, and masters the model before those after it."""
        optimizer = self.optimizer
        last = optimizer.register_step_pre_hook(lambda *_: self.synchronize_gradients())
        first = optimizer.register_step_post_hook(lambda *_: self._end_update())
        optimizer._optimizer_step_post_hooks.move_to_end(first.id, last=False)
        try:
            yield
        finally:
            last.remove()
            first.remove()

    def _step_on_device(self, original: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """A step of a fused optimizer, which is skipped or taken on the device."""
        gradients, optimizer = self.gradients, self.optimizer
        self.synchronize_gradients(for_fused_step=True)
        found_inf = self.findings.flag()
        optimizer.inputs = StepInputs(
            gradients.by_master,
            gradients.in_float32,
            found_inf=found_inf,
            total_norm=gradients.total_norm,
            around=self._updating,
        )
        try:
            with _casting_disabled():
                result = original(*args, **kwargs)
                after_step(self.snapshots, found_inf)
        finally:
            optimizer.inputs = None
            self._end_lending()
        gradients.end_step()
        drop_casts()
        return result

    @contextmanager
    def _updating(self) -> Iterator[None]:
        """The update of a fused step, without the script's hooks before and after it."""
        gradients = self.gradients
        masters = gradients.mastered
        if _has_hooks(self.optimizer):
            self.synchronize_gradients(for_fused_step=True)
        if not self._splits:  # edits of masters, before a step that may leave both alone
            _round_into_model(self._written_masters())
        self.optimizer.inputs.clip = gradients.clipping.pending
        try:
            yield
        finally:
            for slot in masters if self._splits else ():  # the step has written weights and rests
                entry = slot.entry
                entry.rest.before, entry.lower_version = None, slot.param._version
        for slot in masters if not self._splits else ():
            entry, version = slot.entry, slot.master._version
            if version != entry.value_version:  # the step has written both
                entry.value_version, entry.lower_version, entry.put_aside = version, slot.param._version, None

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor | None:
        """Clip the gradients by their norm, which is returned: inside the step where the optimizer does that."""
        gradients = self.gradients
        self.synchronize_gradients(for_fused_step=self._takes_step_inputs)
        norm = gradients.total_norm()
        if norm is not None:
            coefficient = kernels.clip_coefficient(norm, max_norm)
            # Where the norm is not finite the flag decides: inf times 0 would make NaN of it.
            coefficient = torch.where(norm.isfinite(), coefficient, torch.ones_like(coefficient))
            gradients.clip_by(coefficient)
        return norm

    def _end_update(self) -> None:
        self.first_steps.end(self.optimizer)
        self.write_masters_to_model()

    def end_step(self, is_written: bool = False) -> None:
        """After a step that was taken.

        ``is_written`` says that the model has got the masters' values, but for what a hook has written to them since.
        """
        if not is_written:
            self._end_update()
        elif not self._splits:
            _round_into_model(self._written_masters())
        self.gradients.end_step()
        drop_casts()

    def synchronize_gradients(self, for_fused_step: bool = False) -> None:
        """Bring every gradient, unscaled, to where the optimizer and ``master_params`` look for it.

        ``for_fused_step`` leaves those that such a step reads where they are.
        """
        gradients = self.gradients
        gradients.refuse_unseen_writes()
        self._settle(for_fused_step)

    def _settle(self, for_fused_step: bool = False, refuses: bool = True) -> None:
        gradients = self.gradients
        for slot in self._lent:
            slot.master.settle(slot)
        self.findings.drop_cleared()
        for slot in gradients.mastered:
            entry, param = slot.entry, slot.param
            if entry.lower_version != param._version or entry.lower_ptr != param.data_ptr():
                # Else the step would undo what was written to the model since its forward.
                if refuses:
                    entry.refuse_two_writers(param)
                entry.synchronize(param)
        if gradients.delayed_scale is not None:
            self.owner.scaling.finish_delayed(self)
        if not for_fused_step:
            gradients.convert()

    def skip(self, overflows: list[FoundInf]) -> None:
        """In the place of a step, for gradients that are not finite."""
        self.findings.verdict = True
        after_step(self.snapshots, True)
        self.findings.drop_overflowed(overflows)
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

    def _add_param_group(self, original: Callable[..., Any], group: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        params = group.get("params", ()) if isinstance(group, dict) else ()
        if isinstance(group, dict) and not isinstance(params, torch.Tensor):
            group["params"] = params = list(params)
        known = {slot.param for slot in self.gradients.slots}
        for param in (params,) if isinstance(params, torch.Tensor) else params:
            if param in known:
                raise ConfigurationError(
                    f"add_param_group: a parameter of shape {tuple(param.shape)} is in this optimizer already. Leave it out "
                    "of the new group."
                )
        result = original(group, *args, **kwargs)
        self._put_masters()
        return result

    def follow_groups(self) -> None:
        """Train what a script has put into ``param_groups[i]["params"]`` since, on masters.

        What it took out keeps its slot: its gradients are unscaled like the others', and it may come back.
        """
        if not (self._held.are_in(self.optimizer.param_groups) or self.gradients.is_open):
            self._put_masters()

    def _put_masters(self) -> None:
        self._held.put_masters(self.optimizer)
        self.split_masters()


def wrapper_of(optimizer: Any) -> OptimizerWrapper | None:
    """The wrapper that a live session put on this optimizer, if any."""
    return getattr(optimizer, "__dict__", {}).get(WRAPPER_KEY)


def _has_hooks(optimizer: Any) -> bool:
    """Whether hooks of the script run before or after this optimizer's update, where gradients and weights may be written to."""
    own = getattr(optimizer, "_optimizer_step_pre_hooks", None) or getattr(
        optimizer, "_optimizer_step_post_hooks", None
    )
    return own is not None and bool(own or _pre_hooks_of_all or _post_hooks_of_all)


def _round_into_model(slots: list[Slot]) -> None:
    """Round these masters into the model's weights."""
    if slots:
        write_lower([slot.master for slot in slots], [slot.param for slot in slots])
        for slot in slots:
            slot.entry.agree(slot.param)


def drop_casts(before_backward: bool = False) -> None:
    """Forget O1's casts of weights; ``before_backward`` tells that no forward pass follows."""
    casting = active_casting()
    if casting is not None:
        casting.caches.drop(before_backward)


def _casting_disabled() -> Any:
    casting = active_casting()
    return casting.disabled() if casting is not None else nullcontext()
