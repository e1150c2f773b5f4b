"""The gradients of one optimizer, from the backward pass to the step.

After a `scale_loss` block ``param.grad`` is the unscaled gradient in the parameter's precision, and what a script writes there
counts at the step as it does in torch. Where the rounded value is not all there is to know (`Slot.exact`), the step chooses for
each element: the exact value where ``param.grad`` still is its rounding, what the script wrote where it is not. Fused
optimizers read ``param.grad`` itself. For others, and for whoever looks at a master's gradient, it is converted into the
master's, which then is what the step uses. All of this is done by multi-tensor passes, and never waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import kernels
from ..errors import ConfigurationError
from ..optimizers.scales import Scale, inverse, is_one, on, ratio
from ..sharding import by_placement, is_sharded, local, process_groups, total_over
from .clipping import Clipping
from .found_inf import FoundInf, places_for
from .gradient_groups import grouped
from .master_weights import Exact, Seen, Slot
from .sparse_gradients import add_sparse, is_sparse, unscale_sparse, values_of

_CPU = torch.device("cpu")
LISTS_OF_A_COLLECTION = 6  #: how many lists `Gradients.collect` checks at most, but for rare mixtures


@dataclass(eq=False)
class BackwardPass:
    """What has to be known of a backward pass to unscale its gradients.

    Its loss was multiplied by ``scale``. ``local`` says that it ran under ``DDP.no_sync()``. ``exact_in_place`` says that the scale
    is a power of two, so that bfloat16 can be divided by it without rounding. ``done`` are the slots of several optimizers that one
    of them has handled; None where there is only one optimizer. ``was_reached`` tells whether the pass came to a parameter.
    """

    scale: Scale
    local: bool = False
    exact_in_place: bool = False
    done: set[Slot] | None = None
    was_reached: Callable[[torch.Tensor], bool] | None = None

    def not_done(self, slots: list[Slot]) -> list[Slot]:
        """Those that no other optimizer has handled; from now on nobody else does."""
        if self.done is None:
            return slots
        remaining = [slot for slot in slots if slot not in self.done]
        self.done.update(slot for slot in remaining if slot.owners > 1)
        return remaining

    def was_cleared(self, slot: Slot) -> bool:
        """Whether a parameter without a gradient had one, which was cleared inside of the block."""
        return self.was_reached is not None and self.was_reached(slot.param)


class Gradients:
    """Stash, collect, convert: the verbs of an iteration on the gradients of one optimizer.

    ``reads_lower`` says that the optimizer takes lower-precision gradients as they are. ``delayed_scale`` is the scale at which
    gradients wait in ``param.grad`` (``delay_unscale=True``), else None. ``local`` says that they come from a backward pass
    under ``DDP.no_sync()``: only what is in ``param.grad`` will be reduced. While either holds, gradients stay there during the
    next backward pass; otherwise they are stashed, so that fresh ones arrive unmixed. ``leaves_scaled``
    (``model_grads="scaled"``) leaves those of weights with masters at their scale after the block, in ``param.grad``.
    ``process_groups`` are the groups of processes that have to agree whether to step: ``given`` ones, and those that the
    parameters lie on.
    """

    def __init__(self, reads_lower: bool, leaves_scaled: bool, given: Any = None) -> None:
        self.slots: list[Slot] = []
        self.mastered: list[Slot] = []  # those that have a master
        self.by_master: dict[int, Slot] = {}  # by the id of what the optimizer's groups hold
        self.reads_lower = reads_lower
        self.leaves_scaled = leaves_scaled
        self.process_groups = self._given = [] if given is None else [given]
        self.is_open = False
        self.is_named = True  # by the block that it is open in
        self.scale: Scale = 1.0  # of that block
        self.is_stepping = False
        self.delayed_scale: Scale | None = None
        self.local = False
        self.clipping = Clipping()
        # Whether gradients are views of DDP's buckets, which it may replace by others with the same values.
        self.in_buckets = False

    def add(self, slots: Iterable[Slot]) -> None:
        """From now on these parameters' gradients too; where ``slots`` raises, those before stay added.

        torch lets a group name a parameter twice. It has one gradient, and one slot.
        """
        known = set(self.slots)
        for slot in slots:
            if slot in known:
                continue
            known.add(slot)
            slot.owners += 1
            self.slots.append(slot)
            if slot.master is not None:
                self.mastered.append(slot)
                self.by_master[id(slot.target)] = slot
                slot.master.belongs_to(slot, self)
        self.process_groups = list(dict.fromkeys([*process_groups(slot.param for slot in self.slots), *self._given]))

    @property
    def device(self) -> torch.device:
        """Where what is found about them is kept."""
        return self.slots[0].param.device if self.slots else _CPU

    def forget_slots(self) -> None:
        """No parameters any more."""
        for slot in self.slots:
            slot.owners -= 1
        self.slots.clear()
        self.mastered.clear()
        self.by_master.clear()

    # The backward pass

    @property
    def stays(self) -> bool:
        """Whether gradients stay in ``param.grad`` while the next backward pass adds to them."""
        return self.delayed_scale is not None or self.local

    def open(self, scale: Scale, is_named: bool = True, is_empty: bool = False) -> None:
        """Before a backward pass at ``scale``: stash the gradients that are there, or bring those that stay to it.

        `refuse_unseen_writes` comes before: of several optimizers none is opened where one has to be refused. ``is_empty``, which
        `drop_cleared` returns, says that there are none.
        """
        if self.clipping.pending is not None:
            self.convert()
        self._unconvert()
        self.clipping.forget()
        self.is_open, self.is_named, self.scale = True, is_named, scale
        if self.stays:
            self._rescale(scale)
            return
        for slot in self.mastered if is_empty else self.slots:
            gradient = None if is_empty else slot.param.grad
            if gradient is not None:
                slot.stash, slot.param.grad = gradient, None
                if self.in_buckets:  # which the next backward pass overwrites
                    slot.stash = gradient.clone()
                    if slot.exact is not None and slot.exact.rounded.is_still(gradient):
                        slot.exact = slot.exact.moved(slot.stash)
            elif slot.exact is not None:
                slot.exact = None

    @property
    def has_fresh(self) -> bool:
        """Whether the backward pass that just ran left gradients here."""
        for slot in self.slots:
            if slot.param.grad is not None:
                return True
        return False

    def put_back(self, backward: BackwardPass) -> None:
        """After a backward pass that failed, or did not come here: the gradients as they were before it.

        Where gradients stayed in ``param.grad``, what the pass had added to them stays too, unscaled.
        """
        self.is_open = False
        if self.delayed_scale is not None:
            self.delayed_scale = backward.scale
        elif self.local:
            self.collect(BackwardPass(backward.scale, local=True), None)
        else:
            for slot in backward.not_done(self.slots):
                slot.param.grad, slot.stash = slot.stash, None
                if slot.param.grad is not None and backward.was_cleared(slot):
                    slot.param.grad = None
                    slot.clear()

    def keep_scaled(self, scale: Scale) -> None:
        """After a backward pass with ``delay_unscale=True``: leave everything in ``param.grad``, at ``scale``."""
        stashed = [(slot, slot.stash) for slot in self.slots if slot.stash is not None]
        self._multiply(stashed, scale)
        fresh, added = [], []
        for slot, stash in stashed:
            gradient = slot.param.grad
            if gradient is None:
                slot.param.grad = stash
            elif gradient.layout is stash.layout is torch.strided:
                fresh.append(gradient)
                added.append(stash)
            else:
                gradient.add_(stash)
        kernels.multi_tensor_axpby(fresh, added, fresh, 1.0, 1.0)
        for slot in self.slots:
            slot.stash = slot.exact = None
        self.is_open = False
        self.delayed_scale = scale

    def collect(self, backward: BackwardPass, found: FoundInf | None) -> None:
        """After a backward pass: unscale fresh gradients, add them to those before, and check them on the way."""
        fresh, sums = [], []
        for slot in backward.not_done(self.slots):
            gradient, stash = slot.param.grad, slot.stash
            if stash is None:
                if gradient is not None:
                    slot.exact = None
                    fresh.append((slot, gradient))
            elif gradient is not None:
                sums.append((slot, gradient))
            else:
                slot.stash = None
                if backward.was_cleared(slot):
                    slot.clear()
                else:
                    slot.param.grad = stash
        inv = inverse(backward.scale)
        if fresh:
            self._unscale(fresh, backward, inv, found)
        if sums:
            self._add(sums, backward.scale, inv, found)
        if found is not None:
            for slot, _ in (*fresh, *sums):
                if slot.owners > 1:
                    slot.found_inf = found
        self.is_open = False
        self.delayed_scale = None
        self.local = backward.local

    def _unscale(self, fresh: list, backward: BackwardPass, inv: Scale, found: FoundInf | None) -> None:
        """Unscale gradients where they are. What is rounded on the way is kept as it was beside them."""
        scale, multiplies = backward.scale, not is_one(inv)
        if not multiplies and found is None:
            return
        params, inputs, outputs, kept, left = [], [], [], [], []
        for slot, gradient in fresh:
            output = gradient
            if gradient.layout is not torch.strided:
                unscale_sparse(slot, gradient, inv, found)
                continue
            if multiplies and slot.master is not None:
                if self.leaves_scaled:
                    left.append((slot, gradient))
                    continue
                if not (backward.exact_in_place and gradient.dtype is torch.bfloat16):
                    if self.in_buckets or gradient._is_view():  # others see it there
                        kept.append((slot, gradient, gradient.clone()))
                    else:
                        output = slot.param.grad = torch.empty_like(gradient)
                        kept.append((slot, output, gradient))
            params.append(slot.param)
            inputs.append(gradient)
            outputs.append(output)
        kernels.multi_tensor_scale(inputs, outputs if kept else inputs, inv, *places_for(found, params))
        for slot, output, values in kept:
            slot.exact = Exact(values, scale, Seen.now(output))
        if left and found is not None:
            flag, first_bad = places_for(found, [slot.param for slot, _ in left])
            kernels.multi_tensor_unscale_l2norm(
                [gradient for _, gradient in left], None, None, flag, first_bad=first_bad
            )
        for slot, gradient in left:
            slot.exact = Exact(gradient, scale, Seen.now(gradient), is_scaled=True, left_at=scale)

    def _add(self, sums: list[tuple[Slot, torch.Tensor]], scale: Scale, inv: Scale, found: FoundInf | None) -> None:
        """Add fresh gradients to stashed ones: in float32, where the parameter is in lower precision."""
        own, mastered = [], []
        fresh: dict[Slot, torch.Tensor] = {}
        for slot, gradient in sums:
            if slot.owners > 1 and slot.found_inf is not None:
                _drop_if(slot, slot.found_inf.flag)
            if is_sparse(gradient) or is_sparse(slot.stash):
                add_sparse(slot, gradient, inv, found)
                continue
            fresh[slot] = gradient
            (own if slot.master is None else mastered).append((slot, slot.stash))
        if own:
            places = places_for(found, [slot.param for slot, _ in own])
            stashes = [stash for _, stash in own]
            kernels.multi_tensor_axpby(
                [fresh[slot] for slot, _ in own], stashes, stashes, inv, 1.0, places[0], 0, places[1]
            )
        leaves_scaled = self.leaves_scaled and not is_one(scale)
        for group in grouped(mastered):
            totals = [values if values.dtype is torch.float32 else _float32_like(values) for values in group.values]
            group.accumulate([fresh[slot] for slot in group.slots], totals, inv, found)
            if leaves_scaled:
                kernels.multi_tensor_scale(totals, group.gradients, scale)
            for slot, total, gradient in zip(group.slots, totals, group.gradients):
                slot.exact = Exact(total, 1.0, Seen.now(gradient), leaves_scaled, scale)
        for slot in fresh:
            slot.param.grad, slot.stash = slot.stash, None

    def _rescale(self, scale: Scale) -> None:
        """Bring the gradients that stay in ``param.grad`` to this scale."""
        factor = ratio(scale, 1.0 if self.delayed_scale is None else self.delayed_scale)
        if self.delayed_scale is not None:
            self.delayed_scale = scale
        if is_one(factor):
            return
        self._multiply([(slot, slot.param.grad) for slot in self.slots if slot.param.grad is not None], factor)
        for slot in self.slots:
            slot.exact = None

    @staticmethod
    def _multiply(gradients: list[tuple[Slot, torch.Tensor]], factor: Scale) -> None:
        """Multiply these gradients of slots, as exactly as they are known, where they are."""
        sparse = [values_of(gradient) for _, gradient in gradients if is_sparse(gradient)]
        kernels.multi_tensor_scale(sparse, sparse, factor)
        for group in grouped((slot, gradient) for slot, gradient in gradients if not is_sparse(gradient)):
            group.write(group.gradients, factor)

    # The step

    def convert(self) -> None:
        """Bring everything, unscaled and clipped, to where ``master_params`` and ordinary optimizers look for it."""
        clip, self.clipping.pending = self.clipping.pending, None
        fresh = []
        for slot in self.mastered:
            if slot.converted is not None:
                continue
            gradient, exact = slot.param.grad, slot.exact
            if gradient is None:
                slot.master.raw_grad = slot.exact = None
                continue
            slot.converted = Seen.now(gradient)
            if is_sparse(gradient):
                is_exact = exact is not None and exact.rounded.is_still(gradient)
                slot.master.raw_grad = exact.values if is_exact else gradient.to(slot.master.dtype)
            else:
                fresh.append((slot, gradient))
        for group in grouped(fresh):
            group.write([_gradient_of_master(slot) for slot in group.slots])
            for slot in group.slots:
                slot.exact = slot.exact and slot.exact.as_left()
        if clip is not None:
            in_use = [values_of(slot.master.raw_grad) for slot in self.mastered if slot.master.raw_grad is not None]
            kernels.multi_tensor_scale(in_use, in_use, clip)

    def convert_for_reader(self) -> None:
        """Somebody looks at a master's gradient.

        There is nothing to be seen in a backward pass, nor while gradients wait at their scale; and a fused step needs nothing.
        """
        if not (self.is_open or self.is_stepping or self.delayed_scale is not None):
            self.convert()

    def refuse_unseen_writes(self) -> None:
        """Raise where the step would have to choose between what was written to a master's gradient and to the model's."""
        for slot in self.mastered:
            seen, exact = slot.converted, slot.exact
            if seen is None and exact is not None and exact.is_scaled:
                seen = exact.rounded
            gradient = slot.param.grad
            if seen is None or seen.is_still(gradient):
                continue
            if gradient is None or not values_of(gradient).any():  # clearing the model's gradient clears the master's
                slot.clear()
            elif slot.converted is None:
                raise ConfigurationError(
                    f"The gradient of a parameter of shape {tuple(slot.param.shape)} was written to after scale_loss, which leaves "
                    "it multiplied by the loss scale (model_grads='scaled'): the step cannot tell what was meant. Write to the "
                    "gradients of ampkit.master_params(optimizer), clip with ampkit.clip_grad_norm_, or leave out model_grads."
                )
            else:
                raise ConfigurationError(
                    f"The gradient of a parameter of shape {tuple(slot.param.shape)} was written to after the gradients of the "
                    "masters had been looked at (ampkit.master_params, or the parameters of the optimizer's groups), and the "
                    "step can use one of them only. Write to the model's gradients first, or to the masters' alone."
                )
        self.clipping.refuse_unseen_writes()

    def end_step(self) -> None:
        """After a step the model's gradients count again; `drop_cleared` says whether they are to be clipped again.

        Those of masters go: they would be made anew, and else take four bytes a weight until a script clears gradients, which many
        do after the next forward pass.
        """
        self.clipping.end_step()
        for slot in self.mastered:
            slot.converted = slot.master.raw_grad = None

    def in_float32(self, slots: list[Slot]) -> list[torch.Tensor]:
        """The gradients of these slots as exactly as they are known."""
        found: dict[Slot, torch.Tensor] = {}
        for group in grouped((slot, slot.param.grad) for slot in slots):
            outputs = [values if values.dtype is torch.float32 else _float32_like(values) for values in group.values]
            group.write(outputs)
            found.update(zip(group.slots, outputs))
        return [found[slot] for slot in slots]

    def clip_by(self, coefficient: torch.Tensor) -> None:
        """Have every gradient multiplied by this: those of masters by the step, where it reads the model's as they are."""
        own = [slot.param.grad for slot in self.slots if slot.master is None and slot.param.grad is not None]
        own = [values_of(gradient) for gradient in own]
        kernels.multi_tensor_scale(own, own, coefficient)
        if not self.mastered:
            return
        self.clipping.add(coefficient)
        if not self.reads_lower or any(slot.owners > 1 for slot in self.mastered):
            self.convert()
        self.clipping.note(self.mastered)

    def total_norm(self) -> torch.Tensor | None:
        """The Euclidean norm of all gradients, unscaled and clipped so far: float32, shape [1]; None without gradients."""
        own, as_they_are, known, clip = [], [], [], self.clipping.pending
        for slot in self.slots:
            gradient, exact = slot.param.grad, slot.exact
            if slot.converted is not None:
                gradient, exact = slot.master.raw_grad, None
            if gradient is None:
                continue
            if exact is not None and not is_sparse(gradient):
                known.append((slot, gradient))
            elif slot.master is None and clip is not None:
                own.append(values_of(gradient))
            else:
                is_exact = exact is not None and exact.rounded.is_still(gradient)
                as_they_are.append(values_of(exact.values if is_exact else gradient))
        if any(is_sharded(gradient) for _, gradient in known):
            as_they_are += self.in_float32([slot for slot, _ in known])
            known = []
        norms = [_norm(as_they_are), *(group.norm() for group in grouped(known))]
        if clip is not None:
            norms = [norm if norm is None else norm * on(clip, norm.device) for norm in norms]
        norms = [norm for norm in (*norms, _norm(own)) if norm is not None]
        if len(norms) > 1:
            return kernels.multi_tensor_l2norm([on(norm, norms[0].device) for norm in norms])[0]
        return norms[0] if norms else None

    def _unconvert(self) -> None:
        """Before another backward pass: the masters' gradients, whatever was done to them, are the model's again."""
        again = []
        for slot in self.mastered:
            if slot.converted is None:
                continue
            total, gradient = slot.master.raw_grad, slot.param.grad
            slot.master.raw_grad = slot.converted = None
            if total is None:
                slot.param.grad = slot.exact = None
            elif gradient is None or is_sparse(total):
                slot.param.grad = gradient = total.to(slot.param.dtype)
                slot.exact = Exact(total, 1.0, Seen.now(gradient))
            else:
                again.append((slot, total, gradient))
        if again:
            kernels.multi_tensor_scale([total for _, total, _ in again], [gradient for _, _, gradient in again], 1.0)
            for slot, total, gradient in again:
                slot.exact = Exact(total, 1.0, Seen.now(gradient))

    # Clearing

    def drop_cleared(self) -> bool:
        """A clipping goes with the gradients. Returns whether there are none."""
        is_empty = self._is_empty()
        if is_empty:
            self.delayed_scale, self.local = None, False
            self.clipping.forget()
        else:
            self.clipping.clip_again_or_forget()
        return is_empty

    def clear(self, set_to_none: bool = True, only: set[torch.Tensor] | None = None, own: bool = False) -> None:
        """What ``zero_grad`` of torch does not see: stashed and exact gradients, and of parameters with masters one of the two.

        ``own`` says that nobody else will clear those of the parameters without masters. ``only`` names the parameters of a model
        whose own ``zero_grad`` was called; None means all of the optimizer's.
        """
        if only is None:
            self.delayed_scale, self.local = None, False
            self.clipping.forget()
        for slot in self.slots:
            if only is not None and slot.param not in only:
                continue
            slot.clear()
            if only is None and (own or slot.master is not None):
                if set_to_none:
                    slot.param.grad = None
                elif slot.param.grad is not None:
                    gradient = slot.param.grad
                    if gradient.grad_fn is not None:
                        gradient.detach_()
                    gradient.requires_grad_(False).zero_()  # views cannot be detached in place

    def drop_overflowed(self, found: Sequence[FoundInf]) -> None:
        """Write zeros. What several optimizers share stays where its last contribution was not one of those ``found``."""
        self.clipping.forget()
        for slot in self.slots:
            of_slot = slot.found_inf
            if slot.owners > 1 and of_slot is not None and of_slot not in found:
                continue
            slot.clear()
            slot.found_inf = of_slot  # so that the other optimizers skip too
            gradient = slot.param.grad
            if gradient is None:
                continue
            if not is_sparse(gradient):
                gradient.detach().zero_()  # where it is: it may be part of a script's flat buffer
            else:
                slot.param.grad = torch.zeros_like(gradient)

    def first_non_finite(self) -> torch.Tensor | None:
        """The first parameter whose gradient holds an inf or a NaN, in the optimizer's order. Reads from the device."""
        for slot in self.slots:
            gradient = slot.param.grad
            if gradient is not None and not torch.isfinite(local(values_of(gradient))).all():
                return slot.param
        return None

    def _is_empty(self) -> bool:
        """Whether there is no gradient in the model, nor one set aside, as in a block."""
        return not (self.has_fresh or (self.is_open and any(slot.stash is not None for slot in self.slots)))


def _gradient_of_master(slot: Slot) -> torch.Tensor:
    """The tensor for a master's gradient: the one that is there, that of the exact value, or a new one."""
    slot.master.move_like(slot.param)
    gradient, exact = slot.master.raw_grad, slot.exact
    if gradient is None or is_sparse(gradient) or gradient.device != slot.param.device:
        fits = exact is not None and exact.values.dtype is torch.float32 and exact.values.device == slot.param.device
        gradient = slot.master.raw_grad = exact.values if fits else _float32_like(slot.param)
    return gradient


def _float32_like(values: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(values, dtype=torch.float32)


def _drop_if(slot: Slot, found_inf: torch.Tensor) -> None:
    """A contribution that was not finite is no part of the sum."""

    def without(values: torch.Tensor) -> torch.Tensor:
        return torch.where(on(found_inf, values.device) != 0, torch.zeros_like(values), values)

    exact, slot.exact, slot.stash = slot.exact, None, without(slot.stash)
    if exact is not None and exact.is_scaled:
        slot.exact = exact._replace(values=without(exact.values)).moved(slot.stash)


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor | None:
    """The Euclidean norm of all of these together, on all processes: float32, shape [1]; None of none."""
    if not gradients:
        return None
    if not any(map(is_sharded, gradients)):
        return kernels.multi_tensor_l2norm(gradients)[0]
    squares = 0.0
    for parts, groups in by_placement(gradients):
        squares = squares + total_over(groups, kernels.multi_tensor_l2norm(parts)[0].double().square())
    return squares.sqrt().float()
