"""The gradients of one optimizer, from the backward pass to the step, and whether they are finite."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd import profiler

from .. import kernels
from ..casting.narrow_gradients import is_set_aside, note_set_aside, stored_gradient
from ..casting.torch_integration import aliases_taken
from ..errors import ConfigurationError
from ..models.float32_values import clear_gradient, put_gradient
from ..optimizers.scales import Scale, moved_to, norm_of
from ..patching import Reference
from ..sharding import process_groups
from .found_inf import (
    FoundInf,
    Slot,
    add_to_stashes,
    bring_to,
    constant,
    inverse,
    is_sparse,
    places_for,
    unscale,
    values_of,
)
from .reach import are_still, seen


class State(enum.Enum):
    """The place and the scale of an optimizer's gradients, between two backward passes and while a block is open."""

    READY = "unscaled in p.grad, or cleared"
    LOCAL = "unscaled in p.grad; made under no_sync(), and reduced with those of the next backward pass"
    WAITING = "in p.grad at a loss scale, until a block or a step unscales them (delay_unscale=True)"
    IN_BLOCK = "earlier ones in stashes, or with the fresh ones in p.grad; fresh ones at the scale of the block"


#: What a script may not do while a block is open. Every other transition is allowed.
_REFUSED = {
    "step": (
        "optimizer.step() was called inside the scale_loss block, where gradients are still scaled. End the block first: step() "
        "belongs on the level of `with`, not inside it."
    ),
    "clip": (
        "clip_grad_norm_ was called inside the scale_loss block, where gradients are still scaled. End the block first."
    ),
    "open": (
        "scale_loss was entered inside of another scale_loss block. Leave the first block before entering the second: gradients of "
        "several losses add up across blocks. Of threads that train at once, each calls initialize() for its own models and "
        "optimizers."
    ),
}


class Gradients:
    """The gradients of one optimizer: a `State`, and the methods that change it (docs/architecture.md draws them)."""

    def __init__(self, process_group: Any = None) -> None:
        self._of_script = [] if process_group is None else [process_group]
        self.slots: list[Slot] = []
        self.hold(())
        self.state = State.READY
        self.scale: Scale = 1.0  # of the block, or of gradients that wait
        self.before = State.READY  # the state before the open block; if it is another, gradients stay in p.grad
        self.holder: Any = None  # that block, and whether it holds these gradients by a guess
        self._is_guess = False
        self.judged: tuple[Slot, Reference] | None = None  # the first gradient that a block has judged
        self.forget_clipping()

    def hold(self, slots: Iterable[Slot]) -> None:
        """Hold these slots, each once, and no others."""
        before, self.slots = self.slots, list(dict.fromkeys(slots))
        for slot in self.slots:
            slot.owners += 1
        for slot in before:
            slot.owners -= 1
        self.stored = [slot for slot in self.slots if slot.master is not None]  # of weights with rests
        self.params = [slot.param for slot in self.slots]
        self.ids = set(map(id, self.params))
        # The processes that have to agree whether to step: those of `initialize`, and those that the parameters lie on.
        self.process_groups = list(dict.fromkeys([*process_groups(self.params), *self._of_script]))

    @property
    def device(self) -> torch.device:
        """The device of the gradients' flag."""
        return self.slots[0].param.device if self.slots else torch.device("cpu")

    def refuse(self, verb: str) -> None:
        """Raise `ConfigurationError` while a block holds the gradients. First release guesses of a block that got no gradient."""
        if self._is_guess and self.state is State.IN_BLOCK and not self.has_fresh:
            self.put_back()
        if self.state is State.IN_BLOCK:
            raise ConfigurationError(_REFUSED[verb])

    @property
    def has_fresh(self) -> bool:
        """Whether there are gradients in ``param.grad``: in a block, of the backward pass that just ran."""
        for slot in self.slots:
            if stored_gradient(slot.param) is not None:
                return True
        return False

    # The backward pass

    def open(self, scale: Scale, copies: bool = False, holder: Any = None, is_guess: bool = False) -> None:
        """Stash gradients (``copies``: of DDP's buckets) before a backward pass, or bring those that stay to its ``scale``."""
        if self.state is State.IN_BLOCK:
            self.refuse("open")
        if self.clip is not None:
            self.widen()
        # First, so that an interruption of the rest can be undone.
        self.before, self.holder, self._is_guess = self.state, holder, is_guess
        if self.state is State.READY:
            self.stash(self.slots, copies)
        else:
            bring_to(self.slots, self.scale if self.state is State.WAITING else 1.0, scale)
        self.state, self.scale = State.IN_BLOCK, scale

    @staticmethod
    def stash(slots: Iterable[Slot], copies: bool = False) -> None:
        """Set gradients aside, so that fresh ones arrive unmixed."""
        for slot in slots:
            if stored_gradient(slot.param) is not None:
                gradient = slot.stash = slot.param.grad
                clear_gradient(slot.param)
                note_set_aside(slot.param)
                if copies and gradient.dtype is slot.param.dtype:
                    slot.stash = gradient.clone()

    def put_back(self, done: set[Slot] | None = None) -> None:
        """Restore the gradients from before a backward pass. Those that stayed in ``param.grad`` keep what the pass added."""
        if self.before is State.LOCAL:
            self.collect(inverse(self.scale), None, is_local=True)
        elif self.before is State.READY:
            for slot in self._take(done):
                stash, slot.stash = slot.stash, None
                put_gradient(slot.param, stash)
        self.state, self.holder = self.before, None

    def keep_scaled(self, scale: Scale) -> None:
        """Leave all gradients in ``param.grad`` at ``scale``, after a backward pass with ``delay_unscale=True``."""
        fresh, stashes = [], []
        for slot in self.slots:
            gradient, stash, slot.stash = slot.param.grad, slot.stash, None
            if stash is None or not is_set_aside(slot.param):
                continue
            if gradient is None:
                gradient = slot.param.grad = torch.zeros_like(stash, dtype=slot.param.dtype)
            if gradient.layout is stash.layout is torch.strided:
                fresh.append(gradient)
                stashes.append(stash)
            else:
                slot.param.grad = gradient + (stash * moved_to(scale, stash.device)).to(gradient.dtype)
        kernels.multi_tensor_axpby(fresh, stashes, fresh, 1.0, scale)
        self.state, self.scale, self.holder = State.WAITING if self.slots else State.READY, scale, None

    def collect(
        self, inv: Scale, finding: FoundInf | None, is_local: bool = False, done: set[Slot] | None = None
    ) -> None:
        """Unscale and check fresh gradients after a backward pass (``is_local``: under no_sync()), and add them to earlier ones."""
        fresh, sums = [], []
        for slot in self._take(done):
            gradient, stash = slot.param.grad, slot.stash
            if gradient is not None:
                (fresh if stash is None else sums).append((slot, gradient))
            elif stash is not None:
                slot.stash = None
                put_gradient(slot.param, stash)
        with profiler.record_function("ampkit: unscale") if profiler._is_profiler_enabled else nullcontext():
            if fresh:
                unscale(fresh, inv, finding)
            if sums:
                add_to_stashes(sums, inv, finding)
        self.state, self.holder = State.LOCAL if is_local else State.READY, None

    def _take(self, done: set[Slot] | None) -> list[Slot]:
        """Return the slots but for shared ones in ``done``. Drops stashes of gradients that a script has cleared since."""
        slots = self.slots
        if done is not None:
            slots = [slot for slot in slots if slot not in done]
            done.update(slot for slot in slots if slot.owners > 1)
        for slot in slots:
            if slot.stash is not None and not is_set_aside(slot.param):
                slot.stash = None
        return slots

    # Between the block and the step

    def settle(self, refuses: bool = True) -> bool:
        """Restore to ``param.grad`` what `set_aside` has stashed, forget what is gone, and return whether there are gradients."""
        if self.clip is not None:
            self.check_clipped(refuses)
        if self.state is State.IN_BLOCK:
            return True
        for slot in self.stored:
            if slot.stash is not None:
                if slot.param.grad is None:
                    put_gradient(slot.param, slot.stash)
                slot.stash = None
        if self.has_fresh:
            return True
        self.forget()
        return False

    def set_aside(self) -> None:
        """Stash gradients in another dtype than their weights', with which dynamo does not trace. `settle` restores them."""
        for slot in self.stored if self.state is State.READY else ():
            gradient = slot.param.grad
            if gradient is not None and gradient.dtype is not slot.param.dtype:
                slot.stash = gradient
                clear_gradient(slot.param)

    def in_float32(self) -> dict[Slot, torch.Tensor]:
        """Return the gradients of weights with rests in float32, clipped: ``param.grad`` itself where it needs no change."""
        clip, result = self.clip, {}
        inputs, outputs = [], []
        for slot in self.stored:
            if (gradient := slot.param.grad) is None:
                continue
            if gradient.dtype is torch.float32 and clip is None:
                result[slot] = gradient
            elif is_sparse(gradient):
                result[slot] = gradient.float() if clip is None else gradient.float() * moved_to(clip, gradient.device)
            else:
                result[slot] = torch.empty_like(gradient, dtype=torch.float32)
                inputs.append(gradient)
                outputs.append(result[slot])
        kernels.multi_tensor_scale(inputs, outputs, 1.0 if clip is None else clip)
        return result

    def widen(self) -> None:
        """Make ``param.grad`` of weights with rests float32, and clip it: scripts read it as the gradient of a float32 value."""
        if self.state is State.IN_BLOCK or self.state is State.WAITING:
            return  # there is nothing to be seen in a backward pass, nor while gradients wait at their scale
        are_judged = self.are_judged
        for slot, gradient in self.in_float32().items():
            put_gradient(slot.param, gradient)
        self.forget_clipping()
        if are_judged:
            self.note_judged()

    def note_judged(self) -> None:
        self.judged = None
        for slot in self.slots:
            if (gradient := stored_gradient(slot.param)) is not None:
                self.judged = slot, Reference(gradient)
                return

    @property
    def are_judged(self) -> bool:
        """Whether the gradients are still the tensors that a block has judged, written to or not."""
        gradient = None if self.judged is None else stored_gradient(self.judged[0].param)
        return gradient is not None and gradient is self.judged[1]()

    def clip_by(self, coefficient: torch.Tensor) -> None:
        """Multiply every gradient by a coefficient; for weights with rests the step does it."""
        present = [stored_gradient(slot.param) for slot in self.slots if slot.master is None]
        plain = [values_of(gradient) for gradient in present if gradient is not None]
        kernels.multi_tensor_scale(plain, plain, coefficient)
        if self.stored:
            self.clip = coefficient if self.clip is None else self.clip * coefficient
            self.clipped = [(slot, seen([slot.param])) for slot in self.stored]
            self.clip_is_used = False
            if any(slot.owners > 1 for slot in self.stored):
                self.widen()

    def check_clipped(self, refuses: bool = True) -> None:
        """Raise where a script wrote to gradients between their clipping and a step. After a step, forget the clipping."""
        for slot, before in self.clipped:
            if are_still(before, [slot.param]):
                continue
            if self.clip_is_used:
                return self.forget_clipping()
            if refuses and stored_gradient(slot.param) is not None:
                raise ConfigurationError(
                    f"The gradient of a parameter of shape {tuple(slot.param.shape)} was written to after "
                    "ampkit.clip_grad_norm_. Clip last, after every backward pass and every change of gradients."
                )
        return None

    def forget_clipping(self) -> None:
        #: The product of all clippings since the gradients came: a step multiplies gradients of weights with rests by it.
        self.clip: torch.Tensor | None = None
        self.clipped: list[tuple[Slot, Any]] = []  # slots of these weights, and their gradients as they were then
        self.clip_is_used = False  # by a step

    def check(self, finding: FoundInf) -> None:
        """Set the flag of ``finding`` where a present gradient is not finite, on this process."""
        params, gradients = [], []
        for slot in self.slots:
            if (gradient := stored_gradient(slot.param)) is not None:
                params.append(slot.param)
                gradients.append(gradient if gradient.layout is torch.strided else gradient._values())
        flag, first_bad = places_for(finding, params)
        kernels.multi_tensor_unscale_l2norm(gradients, found_inf=flag, first_bad=first_bad)

    def total_norm(self) -> torch.Tensor | None:
        """The Euclidean norm of all gradients, unscaled and clipped so far: float32, shape [1]; None without gradients."""
        clip, plain, clipped = self.clip, [], []
        for slot in self.slots:
            if (gradient := stored_gradient(slot.param)) is not None:
                (plain if clip is None or slot.master is None else clipped).append(values_of(gradient))
        norms = [norm for norm in (norm_of(plain), norm_of(clipped)) if norm is not None]
        if clipped:
            norms[-1] = norms[-1] * moved_to(clip, norms[-1].device)
        if len(norms) > 1:
            return kernels.multi_tensor_l2norm([moved_to(norm, norms[0].device) for norm in norms])[0]
        return norms[0] if norms else None

    # Clearing

    def clear(self, set_to_none: bool, clears_all: bool) -> None:
        """Clear stashes and gradients of weights with rests, and with ``clears_all`` what the optimizer's own method clears."""
        self.forget()
        for slot in self.slots:
            if slot.stash is not None:
                slot.drop_stash()
            if clears_all or slot.master is not None:
                if set_to_none and slot.master is None:
                    slot.param.grad = None
                elif set_to_none:
                    clear_gradient(slot.param)
                elif (gradient := stored_gradient(slot.param)) is not None:
                    if gradient.grad_fn is not None:
                        gradient.detach_()
                    gradient.requires_grad_(False).zero_()  # views cannot be detached in place

    def forget(self) -> None:
        """Forget the state and the clipping of gradients that are gone."""
        if self.state is State.IN_BLOCK:
            self.before = State.READY
        else:
            self.state = State.READY
        if self.clip is not None:
            self.forget_clipping()

    def zero_where(self, flag: torch.Tensor, all_of_them: bool = True) -> None:
        """Write zeros where ``flag`` is not 0, on its device: to all gradients, or to those that several optimizers share."""
        for slot in self.slots:
            gradient = stored_gradient(slot.param) if all_of_them or slot.owners > 1 else None
            if gradient is not None:
                gradient = values_of(gradient).detach()
                gradient.masked_fill_(moved_to(flag, gradient.device) != 0, 0.0)


class Findings:
    """Whether the gradients of one optimizer are finite: "A flag goes with its gradients" in NOTES.md."""

    def __init__(self, gradients: Any, owner: Any) -> None:
        self._gradients, self._owner = gradients, owner
        self.forget()
        #: The other optimizers of the last block, where only steps check, with their flags if they have stepped since.
        self._beside: dict[Findings, FoundInf | None] = {}
        self.of_step: FoundInf | None = None  # the flag that decided the last step
        self.scaler: Any = None  # of the last block

    def clear_flag(self) -> FoundInf:
        return FoundInf(constant(0.0, torch.float32, self._gradients.device).clone(), self._owner.name_of)

    def add(self, finding: FoundInf | None) -> None:
        """Note the flag of a block that has made gradients; None where it does not check them."""
        self._checked = self.shared = None
        if finding is not None:
            before = self._found if self.new else None  # no step has used the flags of new blocks
            if finding not in self.new:  # else the flag of a delayed check, which this block ends
                self.new.append(finding)
            self._found = finding if before in (None, finding) else FoundInf.any_of([before, finding])
            self._gradients.note_judged()
            if self._judged != ():
                self._judged = seen(self._gradients.params), aliases_taken()

    def begin(self, scaler: Any, named: Sequence[Any]) -> None:
        """Note a block that names the optimizer. Where only steps check gradients, all ``named`` optimizers skip together."""
        self.scaler = scaler
        self._beside = {} if len(named) < 2 else {x.findings: None for x in named if x.findings is not self}

    def mark_checked(self, number: torch.Tensor) -> None:
        """Let the next step judge the present gradients by a number that is finite if they are."""
        self._checked = number, seen(self._gradients.params)

    def judge(self, checks: bool = False) -> FoundInf | None:
        """Return the flag that decides on this step, or None where nothing was checked: at loss scale 1 without ``checks``."""
        self._drop_of_others()
        new, self.new = self.new, []
        for finding in new:
            if finding.scaler is not None and finding.scaler.delayed_check is finding:  # ends its iteration
                finding.scaler.update(finding)
        apart = [finding for finding in new if not finding.moves_scale]
        scaler, before = self.scaler or self._owner.scaling.scalers[0], self._found
        is_one = scaler.is_one
        if (checks or not is_one) and not (before is not None and self._is_settled()):
            again = self._look()
            if is_one:
                self._found = scaler.update(self._combine_flags(again) if self._beside else again)
                if scaler.has_news:
                    scaler.report()
            elif before is None or not (new or self._gradients.judged):  # only steps have looked
                apart.append(again)
                self._found = again
            elif not again.is_clean:
                apart += [FoundInf(again.flag - before.flag)] if new else []
                self._found = FoundInf.any_of([before, again])
        if self.shared is not None:
            self._found = self.shared if self._found is None else FoundInf.any_of([self._found, self.shared])
        if apart and not (all_apart := FoundInf.any_of(apart)).is_clean:
            self._owner.scaling.scalers[0].count_apart(all_apart.flag)
        self._checked = None
        self.of_step = self._found
        return self._found

    def report(self) -> None:
        for scaler in dict.fromkeys(filter(None, [self.scaler, *self._owner.scaling.scalers])):
            scaler.report(wait=True)

    @property
    def skipped(self) -> bool:
        """Whether the last step was skipped. Waits for the device where that was decided there."""
        return self.of_step is not None and self.of_step.overflowed

    def look_again(self) -> None:
        self._judged = self._checked = None

    def forget(self) -> None:
        self._found: FoundInf | None = None  # the flag of all blocks that made the present gradients
        self.new: list[FoundInf] = []  # the flags of these blocks, until a step has used them
        # `seen` and `aliases_taken`, when the last block had judged; () if it has added to what no block has judged.
        self._judged: tuple[Any, int | None] | tuple[()] | None = None
        self._checked: tuple[torch.Tensor, Any] | None = None  # a number that is finite if these gradients are
        self.shared: FoundInf | None = None  # that of another optimizer's block, until the next `add`
        self._gradients.judged = None
        self.came_through_no_block = False  # a backward pass outside of every block has written to the gradients

    def drop_cleared(self) -> None:
        """Forget the flags of gradients that were cleared. The flag of a block that has made no gradients stays."""
        if self._gradients.judged is not None or self._found is None:
            self.forget()

    def zero_skipped(self, closes: bool = False) -> None:
        """Write zeros over gradients that a step has refused, before a block adds to them or a session closes."""
        self._drop_of_others()
        if (closes or not self.new) and self._found is not None and not self._found.is_clean:
            self._gradients.zero_where(self._found.flag)

    def before_sum(self) -> None:
        """Prepare for a block that adds to present gradients: where no block has judged these, the step looks at the sum."""
        self.zero_skipped()
        if not self._is_settled():
            self._judged = ()

    def _drop_of_others(self) -> None:
        """Forget the flags of gradients that a script has replaced."""
        if self._gradients.judged is not None and not self._gradients.are_judged:
            self.forget()

    def _combine_flags(self, finding: FoundInf) -> FoundInf:
        """Combine this optimizer's flag with those of the block's other optimizers."""
        findings, beside, self._beside = [finding], self._beside, {}
        for other, known in beside.items():
            findings.append(other._look() if known is None else known)
            if self in other._beside:
                other._beside[self] = finding
        return FoundInf.any_of(findings)

    def _is_settled(self) -> bool:
        """Whether the flag of the blocks still holds: no gradient was written to since they were judged."""
        gradients, owner = self._gradients, self._owner
        if owner.process_group is not None:
            return False
        if gradients.process_groups:  # these processes have agreed in the block
            return True
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        if several and torch.distributed.get_world_size() > 1 and owner.scaling.ddp() is None:
            return False  # a script's own collectives are writes that torch does not count
        if not self._judged:
            return False
        judged, aliases = self._judged
        return aliases is not None and aliases == aliases_taken() and are_still(judged, gradients.params)

    def _look(self) -> FoundInf:
        """Check the present gradients, on all processes that step together, and return the flag."""
        gradients = self._gradients
        if self._checked is not None and are_still(self._checked[1], gradients.params):
            flag = self._checked[0].isfinite().logical_not().float().reshape(())
            finding = FoundInf(flag, self._owner.name_of)
            finding.agree()
            if finding.is_clean or not finding.flag.is_cpu:
                return finding
            # Else for the name: a number tells nothing about each gradient.
        else:
            finding = self.clear_flag()
        gradients.check(finding)
        finding.agree(gradients.process_groups)
        return finding
