"""The gradients of one optimizer, from the backward pass to the step.

After a `scale_loss` block ``param.grad`` is the unscaled gradient in the parameter's precision, and what a script writes there
counts at the step as it does in torch. Where the rounded value is not all there is to know (`Slot.exact`), the step chooses for
each element: the exact value where ``param.grad`` still is its rounding, what the script wrote where it is not. Fused
optimizers read ``param.grad`` itself. For others, and for whoever looks at a master's gradient, it is converted into the
master's, which then is what the step uses. All of this is done by multi-tensor passes, and never waits for a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .. import kernels
from ..errors import ConfigurationError
from ..optimizers.scales import Scale, is_one, on, ratio
from ..sharding import is_sharded, process_groups
from .clipping import Clipping
from .found_inf import FoundInf
from .gradient_groups import grouped, norm_of
from .master_weights import Exact, Seen, Slot
from .sparse_gradients import is_sparse, values_of
from .unscaling import BackwardPass, add, multiply, unscale

_CPU = torch.device("cpu")


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
        self.scale: Scale = 1.0  # of the block that it is open in
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

    def open(self, scale: Scale, is_empty: bool = False) -> None:
        """Before a backward pass at ``scale``: stash the gradients that are there, or bring those that stay to it.

        `refuse_unseen_writes` comes before: of several optimizers none is opened where one has to be refused. ``is_empty``, which
        `drop_cleared` returns, says that there are none.
        """
        if self.clipping.pending is not None:
            self.convert()
        self._unconvert()
        self.clipping.forget()
        self.is_open, self.scale = True, scale
        if self.stays:
            factor = ratio(scale, 1.0 if self.delayed_scale is None else self.delayed_scale)
            if self.delayed_scale is not None:
                self.delayed_scale = scale
            if not is_one(factor):
                multiply([(slot, slot.param.grad) for slot in self.slots if slot.param.grad is not None], factor)
                for slot in self.slots:
                    slot.exact = None
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
            return
        if self.local:
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
        multiply(stashed, scale)
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
        if fresh:
            unscale(fresh, backward, found, self.in_buckets, self.leaves_scaled)
        if sums:
            add(sums, backward, found, self.leaves_scaled)
        if found is not None:
            for slot, _ in (*fresh, *sums):
                if slot.owners > 1:
                    slot.found_inf = found
        self.is_open = False
        self.delayed_scale = None
        self.local = backward.local

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

        There is nothing to be seen in a backward pass, nor while gradients wait at their scale.
        """
        if not self.is_open and self.delayed_scale is None:
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
            outputs = group.in_float32()
            group.write(outputs)
            found.update(zip(group.slots, outputs))
        return [found[slot] for slot in slots]

    def clip_by(self, coefficient: torch.Tensor) -> None:
        """Have every gradient multiplied by this: those of masters by the step, where it reads the model's as they are."""
        own = [values_of(slot.param.grad) for slot in self.slots if slot.master is None and slot.param.grad is not None]
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
        norms = [norm_of(as_they_are), *(group.norm() for group in grouped(known))]
        if clip is not None:
            norms = [norm if norm is None else norm * on(clip, norm.device) for norm in norms]
        norms = [norm for norm in (*norms, norm_of(own)) if norm is not None]
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
        is_empty = not self.has_fresh
        if is_empty:
            self.delayed_scale, self.local = None, False
            self.clipping.forget()
        else:
            self.clipping.clip_again_or_forget()
        return is_empty

    def clear(self, set_to_none: bool, own: bool) -> None:
        """What ``zero_grad`` of torch does not see: stashed and exact gradients, and of parameters with masters one of the two.

        ``own`` says that nobody else will clear those of the parameters without masters.
        """
        self.delayed_scale, self.local = None, False
        self.clipping.forget()
        for slot in self.slots:
            slot.clear()
            if own or slot.master is not None:
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


def _gradient_of_master(slot: Slot) -> torch.Tensor:
    """The tensor for a master's gradient: the one that is there, that of the exact value, or a new one."""
    slot.master.move_like(slot.param)
    gradient, exact = slot.master.raw_grad, slot.exact
    if gradient is None or is_sparse(gradient) or gradient.device != slot.param.device:
        fits = exact is not None and exact.values.dtype is torch.float32 and exact.values.device == slot.param.device
        gradient = slot.master.raw_grad = exact.values if fits else torch.empty_like(slot.param, dtype=torch.float32)
    return gradient
