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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from .. import kernels
from ..casting.engine import active_casting
from ..casting.tensors import cast_state
from ..dtypes import LOWER_PRECISION
from ..errors import ClosureError, ConfigurationError
from ..logs import logger
from ..models.float32_values import Float32Value, write_lower
from ..optimizers.fused import StepInputs
from ..patching import PatchSet
from .findings import Findings
from .found_inf import FoundInf
from .gradients import Gradients
from .held_parameters import FirstSteps, HeldParameters, StateOfWeights
from .loss_scale import LossScaler
from .master_weights import Slot, Slots, put_params_back
from .optimizer_traits import clears_as_torch, evaluates_once, takes_found_inf, takes_step_inputs
from .running_statistics import Snapshot, after_step

# Bound once: asked in every step.
_compiling = torch.compiler.is_dynamo_compiling
# Those of torch.optim.optimizer.register_optimizer_step_pre_hook and register_optimizer_step_post_hook.
_pre_hooks_of_all = sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
_post_hooks_of_all = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks

WRAPPER_KEY = "_ampkit"


class _SkippedInClosure(Exception):
    """Unwinds an optimizer whose closure met an overflow; never leaves `OptimizerWrapper.step`."""


class OptimizerWrapper:
    """One optimizer of a session (``owner``): slots, gradients, what was found in them, and methods in the place of its own."""

    def __init__(self, optimizer: Any, owner: Any, slots: Slots, values: Mapping[torch.Tensor, Float32Value]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.owner = owner
        self._slots = slots
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
        self._lent: set[Slot] = set()  # since the last step
        try:
            if self._splits and not self._takes_step_inputs:
                raise ConfigurationError(
                    f"The step of this {type(optimizer).__name__} is not its own any more, as where a learning-rate scheduler "
                    "was made before initialize(), and split masters are updated by that alone. Make the scheduler after "
                    "initialize(), or use master_weights=True."
                )
            for group in optimizer.param_groups:
                self.gradients.add(slots.put_into(group, optimizer.state, values))
            self._held = HeldParameters(optimizer.param_groups)
            self._first_steps = FirstSteps(optimizer)
            self._state_of_weights = StateOfWeights()
            self._install(optimizer)
        except BaseException:
            self.detach()
            raise

    @property
    def optimizer(self) -> Any:
        return self._optimizer()

    def trains_beside(self, thread: int) -> bool:
        """Whether another thread than this one trains it: the gradients that it has at the moment are that one's alone."""
        if self.thread is None or self.thread == thread:
            return False
        return any(other.ident == self.thread for other in threading.enumerate())

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
        masters = list(self.gradients.mastered)
        param_of = self._param_of_master()
        for group in optimizer.param_groups if optimizer is not None else ():
            put_params_back(group, optimizer.state, param_of)
        for own, cast in self._state_cast(lambda param: torch.float32):
            own.update(cast)
        for slot in masters:
            slot.entry.synchronize(slot.param)
            slot.param.grad = None
            slot.param.data = slot.entry.current(slot.param) if slot.is_split else slot.master.data
            gradient = slot.master.raw_grad
            # Not where the weight has another shape since (``p.data = ...``).
            slot.param.grad = None if gradient is None or gradient.shape != slot.param.shape else gradient
        self.gradients.forget_slots()

    def matched_state(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """State that came with a parameter which now trains in lower precision, in its dtype, as fresh state would be.

        Pairs of a state and what to update it with: nothing is written before all memory is there.
        """
        if getattr(self.optimizer, "keeps_float32_state", False):
            return []
        return self._state_cast(lambda param: param.dtype)

    def _state_cast(
        self, dtype_for: Callable[[torch.Tensor], torch.dtype]
    ) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        optimizer = self.optimizer
        state = {} if optimizer is None or getattr(optimizer, "keeps_narrow_state", False) else optimizer.state
        found = []
        for slot in self.gradients.slots:
            if slot.master is None and slot.param.dtype in LOWER_PRECISION and slot.param in state:
                own = state[slot.param]
                found.append((own, cast_state(own, dtype_for(slot.param))))
        return found

    def split_masters(self) -> None:
        """Let go of the float32 values of split masters: last of all, since until then what failed is undone exactly."""
        for slot in self.gradients.mastered:
            slot.split()

    def lend_masters(self) -> Iterator[torch.Tensor]:
        """What the optimizer updates, in its order: masters that are split as float32 values, one at a time."""
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

    def _param_of_master(self) -> dict[torch.Tensor, torch.Tensor]:
        """The parameters by the masters that stand in their places."""
        return {slot.master: slot.param for slot in self.gradients.mastered if not slot.is_split}

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

    def _install(self, optimizer: Any) -> None:
        self._patches.set(optimizer, WRAPPER_KEY, self)
        self._replace(optimizer, "step", self._step)
        self._replace(optimizer, "zero_grad", self._zero_grad)
        if hasattr(optimizer, "add_param_group"):
            self._replace(optimizer, "add_param_group", self._add_param_group)

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
        self._state_of_weights.bring_to_masters(self.optimizer, self.gradients.mastered)
        if callable(closure):
            kwargs.pop("closure", None)
            return self._step_with_closure(original, closure, *rest, **kwargs)
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
            return self._skip(overflows)
        self._first_steps.begin(self.gradients.slots)
        try:
            with _casting_disabled(), self._between_hooks() if hooked else nullcontext():
                result = original(*args, **kwargs)
                after_step(self.snapshots, found_inf)
        finally:
            if self._takes_found_inf:
                del optimizer.grad_scale, optimizer.found_inf
        self._end_step(is_written=hooked)
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
        inputs = optimizer.inputs = StepInputs(
            gradients.by_master,
            gradients.in_float32,
            found_inf=found_inf,
            total_norm=gradients.total_norm,
            around=lambda: self._updating(inputs),
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
    def _updating(self, inputs: StepInputs) -> Iterator[None]:
        """The update of a fused step, without the script's hooks before and after it."""
        gradients = self.gradients
        masters = gradients.mastered
        if _has_hooks(self.optimizer):
            self.synchronize_gradients(for_fused_step=True)
        if not self._splits:  # edits of masters, before a step that may leave both alone
            _round_into_model(self._written_masters())
        inputs.clip = gradients.clipping.pending
        gradients.is_stepping = True
        try:
            yield
        finally:
            gradients.is_stepping = False
            for slot in masters if self._splits else ():  # the step has written weights and rests
                entry = slot.entry
                entry.rest.before, entry.lower_version = None, slot.param._version
        for slot in masters if not self._splits else ():
            entry, version = slot.entry, slot.master._version
            if version != entry.value_version:  # the step has written both
                entry.value_version, entry.lower_version, entry.put_aside = version, slot.param._version, None

    def skip(self, found: FoundInf) -> None:
        """In the place of a step, for gradients that are not finite."""
        self.findings.verdict = True
        self._skip([found])

    def warn_of_scaled(self) -> None:
        """Say once that gradients are looked at before the block has unscaled them, as where a script clips there."""
        if self._has_warned_of_scaled:
            return
        self._has_warned_of_scaled = True
        logger.warning(
            "master_params was asked for inside the scale_loss block, where gradients are still multiplied by the loss scale and "
            "master weights have none yet: clipping there does not clip what the step uses. Do it after the block, on the level "
            "of `with`."
        )

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

    def _step_with_closure(
        self, original: Callable[..., Any], closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        if not evaluates_once(self.optimizer):
            return self._step_that_may_evaluate_again(original, closure, *args, **kwargs)
        with torch.enable_grad():
            loss = closure()
        self._step_once(original, *args, **kwargs)
        return loss

    def _step_that_may_evaluate_again(
        self, original: Callable[..., Any], closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Each evaluation sees the masters as they are by then; an overflow in one takes the whole step back."""
        self.findings.verdict = False
        loss, evaluations, overflows = None, 0, []
        before = [(slot.target, slot.target.detach().clone()) for slot in self.gradients.slots]
        casting_off = _casting_disabled()

        def evaluate() -> Any:
            nonlocal loss, evaluations, overflows
            evaluations += 1
            if evaluations > 1 and self.owner.plan.has_dynamic_loss_scale:
                raise ClosureError(
                    f"{type(self.optimizer).__name__} evaluated its closure a second time in one step, which a dynamic loss "
                    "scale does not allow: the scale may move between two evaluations. Use a static scale (loss_scale=128.0), "
                    "or bfloat16 without one (opt_level='O4' or 'O5'). The parameters are as they were before the step."
                )
            self.write_masters_to_model()
            # As it was where step() was called.
            with getattr(casting_off, "paused", nullcontext)():
                loss = closure()
            self.synchronize_gradients()
            if overflows := self.findings.overflows():
                raise _SkippedInClosure
            self._first_steps.begin(self.gradients.slots)
            return loss

        try:
            with casting_off:
                result = original(evaluate, *args, **kwargs)
        except (_SkippedInClosure, ClosureError) as error:
            with torch.no_grad():
                for target, value in before:
                    target.copy_(value)
            if isinstance(self.optimizer, torch.optim.LBFGS):
                self.optimizer.state.clear()  # it would look for what the rest of the step leaves there
            self.write_masters_to_model()
            self.gradients.end_step()
            if isinstance(error, ClosureError):
                raise
            self._skip(overflows)
            return loss
        after_step(self.snapshots, None)
        self._end_step()
        return result

    def _end_update(self) -> None:
        self._first_steps.end(self.optimizer)
        self.write_masters_to_model()

    def _end_step(self, is_written: bool = False) -> None:
        """``is_written`` says that the model has got the masters' values, but for what a hook has written to them since."""
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

    def _skip(self, overflows: list[FoundInf]) -> None:
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
        optimizer = self.optimizer
        before = len(optimizer.param_groups)
        result = original(group, *args, **kwargs)
        values = self.owner.float32_values()
        for added in optimizer.param_groups[before:]:
            self.gradients.add(self._slots.put_into(added, optimizer.state, values))
        self.split_masters()
        self._held = HeldParameters(optimizer.param_groups)
        return result

    def follow_groups(self) -> None:
        """Train what a script has put into ``param_groups[i]["params"]`` since, on masters.

        What it took out keeps its slot: its gradients are unscaled like the others', and it may come back.
        """
        optimizer = self.optimizer
        if self._held.are_in(optimizer.param_groups) or self.gradients.is_open:
            return
        param_of = self._param_of_master()
        values = self.owner.float32_values()
        for group in optimizer.param_groups:
            if not isinstance(group["params"], list):
                group["params"] = list(group["params"])
            put_params_back(group, optimizer.state, param_of)
            self.gradients.add(self._slots.put_into(group, optimizer.state, values))
        self.split_masters()
        self._held = HeldParameters(optimizer.param_groups)


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
