"""The gradients of one optimizer, from the backward pass to the step.

Between two steps a gradient may be in one of four places: fresh and scaled in ``param.grad``; `Pending` there, checked and
still scaled, for a fused optimizer that reads lower precision; unscaled in ``target.grad`` (the master's, or the parameter's
own where it has no master); or set aside while a backward pass runs, so that fresh gradients arrive unmixed. `Gradients`
moves them, one multi-tensor pass at a time, and never waits for a device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .. import kernels
from ..optimizers.scales import Scale, inverse, is_one, on, ratio
from . import passes
from .found_inf import Check, Verdict
from .master_weights import COLLECTED, Slot, is_shared, mark_collected

LISTS_OF_A_COLLECTION = 4  #: how many lists `Gradients.collect` checks at most


@dataclass
class Pending:
    """Gradients that a fused step will read where the backward pass left them: in ``slot.param.grad``, times ``scale``.

    ``norm`` is theirs, unscaled, where a pass over them has found it.
    """

    slots: list[Slot]
    scale: Scale
    norm: torch.Tensor | None = None


class Gradients:
    """Set aside, collect, put back: the verbs of ``scale_loss`` on the gradients of one optimizer.

    ``delayed`` says that scaled gradients wait in ``param.grad`` (``delay_unscale=True``). ``local`` says that they come
    from a backward pass under ``DDP.no_sync()``: only what is in ``param.grad`` will be reduced, so they must stay there
    and take part in the next backward pass. While either holds, gradients stay; otherwise they are set aside.

    ``reads_lower`` says that the optimizer takes lower-precision gradients, which then stay `pending` instead of being
    converted. ``clip`` is what all gradients have yet to be multiplied by.

    ``done`` arguments: parameters already handled in this pass, for optimizers that share some; None for one optimizer.
    """

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.mastered: list[Slot] = []  # those that have a master
        self.reads_lower = False
        self.is_open = False
        self.delayed = False
        self.local = False
        self.pending: Pending | None = None
        self.clip: torch.Tensor | None = None
        # The finding on gradients that a step has used already; and what was found at steps since they were cleared.
        self.used_flag: torch.Tensor | None = None
        self.used_by: list[Verdict] = []
        # Whether gradients are views of DDP's buckets, which it may replace by others with the same values.
        self.in_buckets = False
        # The scales at which gradients stand in param.grad, of parameters without and with a master.
        self._own_scale: Scale = 1.0
        self._low_scale: Scale = 1.0

    def add(self, slots: Iterable[Slot]) -> None:
        """From now on these parameters' gradients too; where ``slots`` raises, those before stay added.

        torch lets a group name a parameter twice. It has one gradient, and one slot.
        """
        known = {slot.param for slot in self.slots}
        for slot in slots:
            if slot.param in known:
                continue
            known.add(slot.param)
            self.slots.append(slot)
            if slot.master is not None:
                self.mastered.append(slot)

    def forget_slots(self) -> None:
        """No parameters any more."""
        self.slots.clear()
        self.mastered.clear()

    def open(self, scale: Scale) -> None:
        """Before a backward pass at ``scale``: bring gradients that stay to it, set the others aside."""
        if self.uncollected():
            self.collect_raw()
        if self.clip is not None:
            self.materialise()
        self._opened_from = (self._own_scale, self._low_scale, self.pending)
        self.is_open = True
        if self.delayed or self.local:
            self.pending = None
            self._rescale(scale, scale)
            return
        for slot in self.slots:
            gradient = slot.param.grad
            if gradient is not None:
                # The next backward pass overwrites DDP's buckets.
                slot.aside = gradient.clone() if self.in_buckets else gradient
                slot.param.grad = None

    def put_back(self, done: set[torch.Tensor] | None = None) -> None:
        """After a backward pass that failed: the gradients as they were before it.

        Where gradients stayed in ``param.grad``, what the pass had added to them stays too, at their former scale.
        """
        self.is_open = False
        if self.delayed or self.local:
            own_scale, low_scale, self.pending = self._opened_from
            self._rescale(own_scale, low_scale)
            return
        for slot in self._remaining(done):
            if slot.aside is not None or slot.param.grad is not None:
                slot.param.grad, slot.aside = slot.aside, None

    def keep_scaled(self, scale: Scale) -> None:
        """After a backward pass with ``delay_unscale=True``: leave everything in ``param.grad``, at ``scale``."""
        if self.pending is not None:
            waiting, self.pending = self.pending, None
            passes.to_masters(waiting.slots, [slot.aside for slot in waiting.slots], inverse(waiting.scale))
        for slot in self.slots:
            if slot.master is None:
                passes.join(slot, scale)
            elif slot.param.grad is not None:
                slot.aside = None  # else it stays as the sign that the master's gradient was not cleared
        self.is_open = False
        self.delayed = True
        self._own_scale = self._low_scale = scale

    def collect(
        self,
        scale: Scale,
        check: Check | None,
        *,
        local: bool = False,
        done: set[torch.Tensor] | None = None,
    ) -> None:
        """After a backward pass at ``scale``: unscale fresh gradients into their targets, adding to what was there.

        One pass over the fresh gradients checks them (into ``check``), converts and unscales; where a fused step will
        read them as they are, it only checks. Under ``no_sync`` (``local``) ``param.grad`` holds the sum of all
        micro-batches so far, and replaces what the master had.
        """
        replace = self.local or local
        before, self.pending = self.pending, None
        waiting = set(before.slots) if before is not None else ()
        fresh, added, summed, left, missed = [], [], [], [], []  # slots, by what happens to them
        for slot in self._remaining(done):
            if local:
                passes.join(slot, scale if slot.master is None else ratio(scale, self._low_scale))
            aside, slot.aside = slot.aside, None
            gradient = slot.param.grad
            if aside is None and slot.master is None and gradient is not None and gradient.layout is torch.strided:
                fresh.append((slot, gradient))  # as most are, where weights are float32
                continue
            if gradient is None:
                slot.param.grad = aside
                if slot in waiting and aside is not None:
                    missed.append(slot)
                continue
            has_low_before = slot in waiting and aside is not None and not replace
            if has_low_before and gradient.layout is not torch.strided:
                passes.to_masters([slot], [aside], inverse(before.scale))
                has_low_before = False
            if slot.master is None:
                standing = aside
            else:
                standing = None if replace else slot.master.grad
            if standing is not None and standing.layout is not gradient.layout:
                standing = standing.to_dense()
                gradient = gradient if gradient.layout is torch.strided else gradient.to_dense()
                if slot.master is not None:
                    slot.master.grad = standing
            if gradient.layout is not torch.strided:
                passes.collect_sparse(slot, gradient, standing, inverse(scale), check)
            elif has_low_before:
                summed.append((slot, gradient, aside))
            elif standing is not None:
                added.append((slot, gradient, standing))
                if slot.master is None:
                    slot.param.grad = standing
            elif self.reads_lower and slot.master is not None and not is_shared(slot.master):
                slot.master.grad = None
                left.append(slot)
            else:
                fresh.append((slot, gradient))
            if slot.master is not None:
                mark_collected(gradient)
        inv = inverse(scale)
        if missed:
            passes.to_masters(missed, [slot.param.grad for slot in missed], inverse(before.scale))
        if fresh:
            passes.unscale(fresh, inv, check)
        if added:
            slots, xs, ys = zip(*added)
            passes.axpby(slots, xs, ys, ys, inv, 1.0, check)
        if summed:
            slots, xs, ys = zip(*summed)
            outputs = [passes.target_gradient(slot, x) for slot, x in zip(slots, xs)]
            passes.axpby(slots, xs, ys, outputs, inv, inverse(before.scale), check)
        if left:
            self.pending = Pending(left, scale)
            if check is not None:
                self.pending.norm = passes.unscaled_norm(left, scale, check)
        self.is_open = False
        self.delayed = False
        self.local = local
        self.used_flag = None
        self._own_scale, self._low_scale = 1.0, scale

    def collect_raw(self) -> None:
        """Gradients of a backward pass without ``scale_loss``: nothing was scaled, and the masters must have them all the same."""
        raw = [slot for slot in self.slots if _is_raw(slot)]
        self.materialise()
        for slot in raw:
            mark_collected(slot.param.grad)
            if slot.param.grad.layout is not torch.strided:
                passes.collect_sparse(slot, slot.param.grad, None, 1.0, None)
        raw = [slot for slot in raw if slot.param.grad.layout is torch.strided]
        if self.reads_lower and not any(is_shared(slot.master) for slot in raw):
            self.pending = Pending(raw, 1.0)
        else:
            passes.to_masters(raw, [slot.param.grad for slot in raw], 1.0)
        self.delayed = self.local = False
        self.used_flag = None
        self._own_scale = self._low_scale = 1.0

    def materialise(self) -> None:
        """Bring everything, unscaled and clipped, to where ``master_params`` and ordinary optimizers look for it."""
        pending, self.pending = self.pending, None
        clip, self.clip = self.clip, None
        if clip is not None:
            left = set(pending.slots) if pending is not None else ()
            targets = [slot.target.grad for slot in self.slots if slot not in left and slot.target.grad is not None]
            passes.scale_in_place(list(dict.fromkeys(targets)), clip)
        if pending is not None:
            factor = inverse(pending.scale)
            if clip is not None:
                factor = clip * on(factor, clip.device)
            passes.to_masters(pending.slots, [slot.param.grad for slot in pending.slots], factor)

    def total_norm(self) -> torch.Tensor | None:
        """The Euclidean norm of all gradients, unscaled and clipped so far: float32, shape [1]; None without gradients."""
        norms = []
        if self.pending is not None:
            if self.pending.norm is None:
                self.pending.norm = passes.unscaled_norm(self.pending.slots, self.pending.scale, None)
            norms.append(self.pending.norm)
        left = set(self.pending.slots) if self.pending is not None else ()
        others = [slot.target.grad for slot in self.slots if slot not in left and slot.target.grad is not None]
        others = [passes.values(gradient) for gradient in dict.fromkeys(others)]
        if others:
            norms.append(kernels.multi_tensor_l2norm(others)[0])
        if not norms:
            return None
        total = norms[0] if len(norms) == 1 else passes.combined(norms)
        return total if self.clip is None else total * on(self.clip, total.device)

    @property
    def waiting_scale(self) -> Scale:
        """The scale of gradients that wait after ``delay_unscale=True``."""
        return self._low_scale

    def uncollected(self) -> bool:
        """Whether the model holds gradients that never went through ``scale_loss``, and so never reached a master."""
        if self.delayed:
            return False
        for slot in self.mastered:  # not any(): this runs three times in an iteration
            gradient = slot.param.grad
            if gradient is not None and not hasattr(gradient, COLLECTED) and _is_raw(slot):
                return True
        return False

    def drop_cleared(self) -> None:
        """Clearing a model's gradients clears the masters' too, and a new gradient makes the master's old one void."""
        for slot in self.mastered:
            gradient, master = slot.param.grad, slot.master
            if master.grad is None or slot.aside is not None:
                continue
            is_new = gradient is not None and not (self.delayed or self.in_buckets or hasattr(gradient, COLLECTED))
            if gradient is None or is_new:
                master.grad = None
            elif (
                getattr(gradient, COLLECTED, gradient._version) != gradient._version
                and not passes.values(gradient).any()
            ):
                # zero_grad(set_to_none=False): a counted write that left nothing but zeros.
                master.grad = None
        if self.pending is not None and not self.is_open:
            self._drop_cleared_pending()
        if self._is_empty():
            self.delayed = self.local = False
            self.clip = self.used_flag = None
            self.used_by = []

    def clear_params(self, set_to_none: bool = True, only: set[torch.Tensor] | None = None) -> None:
        """The part of ``zero_grad`` that nobody else sees: gradients set aside, and those on the far side of a master.

        ``only`` names the parameters of a model whose own ``zero_grad`` was called; None means all of the optimizer's.
        """
        if only is None:
            self.delayed = self.local = False
            self.pending = self.clip = self.used_flag = None
            self.used_by = []
        elif self.pending is not None:
            self._keep_pending([slot for slot in self.pending.slots if slot.param not in only])
        for slot in self.slots:
            if only is not None and slot.param not in only:
                continue
            slot.aside = None
            if slot.master is None:
                continue
            if only is not None:
                slot.master.grad = None
            elif slot.param.grad is not None:
                if set_to_none:
                    slot.param.grad = None
                else:
                    slot.param.grad.detach_().zero_()

    def drop_overflowed(self) -> None:
        """After a skipped step: its gradients are not finite and of no use to anyone, least of all to the next step."""
        self.pending = self.clip = self.used_flag = None
        self.used_by = []
        for slot in self.slots:
            if slot.master is not None:
                slot.master.grad = None
            elif slot.param.grad is not None:
                slot.param.grad = torch.zeros_like(slot.param.grad)

    def drop_known_overflow(self) -> None:
        """Drop gradients that nobody has cleared since a step that turned out, without waiting, to have been skipped."""
        if any(verdict.is_known and verdict.overflowed for verdict in self.used_by):
            self.drop_overflowed()

    def first_non_finite(self) -> torch.Tensor | None:
        """The first parameter whose gradient holds an inf or a NaN, in the optimizer's order. Reads from the device."""
        for slot in self.slots:
            for gradient in (slot.target.grad, slot.param.grad):
                if gradient is not None and not torch.isfinite(passes.values(gradient)).all():
                    return slot.param
        return None

    def _is_empty(self) -> bool:
        """Whether there is no gradient in the model, nor one set aside."""
        for slot in self.slots:
            if slot.param.grad is not None or slot.aside is not None:
                return False
        return True

    def _drop_cleared_pending(self) -> None:
        kept = []
        for slot in self.pending.slots:
            gradient = slot.param.grad
            if gradient is not None and (self.in_buckets or hasattr(gradient, COLLECTED)):
                kept.append(slot)
                if getattr(gradient, COLLECTED, None) != gradient._version:  # somebody wrote to it
                    mark_collected(gradient)
                    self.pending.norm = None
        if len(kept) != len(self.pending.slots):
            self._keep_pending(kept)

    def _keep_pending(self, slots: list[Slot]) -> None:
        self.pending = Pending(slots, self.pending.scale) if slots else None

    def _rescale(self, own_scale: Scale, low_scale: Scale) -> None:
        """Bring the gradients that stay in ``param.grad`` to these scales."""
        for has_master, factor in (
            (False, ratio(own_scale, self._own_scale)),
            (True, ratio(low_scale, self._low_scale)),
        ):
            if not is_one(factor):
                gradients = [
                    slot.param.grad
                    for slot in self.slots
                    if (slot.master is not None) is has_master and slot.param.grad is not None
                ]
                passes.scale_in_place(gradients, factor)
        self._own_scale, self._low_scale = own_scale, low_scale

    def _remaining(self, done: set[torch.Tensor] | None) -> list[Slot]:
        """The slots whose parameters are not ``done``; from now on they are."""
        if done is None:
            return self.slots
        remaining = [slot for slot in self.slots if slot.param not in done]
        done.update(slot.param for slot in remaining)
        return remaining


def _is_raw(slot: Slot) -> bool:
    return (
        slot.master is not None
        and slot.master.grad is None
        and slot.param.grad is not None
        and not hasattr(slot.param.grad, COLLECTED)
    )
