"""The gradients of one optimizer, from the backward pass to the step.

After a `scale_loss` block ``param.grad`` is the unscaled gradient in the parameter's precision, and what a script writes there
counts at the step as it does in torch. Where the rounded value is not all there is to know (`Slot.exact`), the step chooses for
each element: the exact value where ``param.grad`` still is its rounding, what the script wrote where it is not. Fused
optimizers read ``param.grad`` itself. For others, and for whoever looks at a master's gradient, it is converted into the
master's, which then is what the step uses. All of this is done by multi-tensor passes, and never waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .. import kernels
from ..errors import ConfigurationError
from ..models.weights import move_like
from ..optimizers.scales import Scale, inverse, is_one, on, ratio
from ..sharding import by_placement, is_sharded, local, process_groups, total_over
from .found_inf import Check, Verdict
from .master_weights import Exact, Seen, Slot

LISTS_OF_A_COLLECTION = 3  #: how many lists `Gradients.collect` checks at most


class Gradients:
    """Stash, collect, convert: the verbs of an iteration on the gradients of one optimizer.

    ``reads_lower`` says that the optimizer takes lower-precision gradients as they are. ``delayed_scale`` is the scale at which
    gradients wait in ``param.grad`` (``delay_unscale=True``), else None. ``local`` says that they come from a backward pass
    under ``DDP.no_sync()``: only what is in ``param.grad`` will be reduced. While either holds, gradients stay there during the
    next backward pass; otherwise they are stashed, so that fresh ones arrive unmixed. ``clip`` is what the step has yet to
    multiply the gradients of masters by.
    """

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.mastered: list[Slot] = []  # those that have a master
        self.by_master: dict[int, Slot] = {}  # by the master's id
        self.reads_lower = False
        self.is_open = False
        self.is_bystander = False  # open in a block that did not name the optimizer
        self.is_stepping = False
        self.delayed_scale: Scale | None = None
        self.local = False
        self.clip: torch.Tensor | None = None
        # The finding on gradients that a step has used already; and what was found at steps since they were cleared.
        self.used_flag: torch.Tensor | None = None
        self.used_by: list[Verdict] = []
        # Whether gradients are views of DDP's buckets, which it may replace by others with the same values.
        self.in_buckets = False
        self._clipped: list[tuple[Slot, Seen]] = []
        self._groups: tuple[int, list[Any]] | None = None  # of so many slots

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
                self.by_master[id(slot.master)] = slot
                slot.master.belongs_to(slot, self)

    def process_groups(self) -> list[Any]:
        """The groups of processes that the parameters lie on."""
        if self._groups is None or self._groups[0] != len(self.slots):
            self._groups = (len(self.slots), process_groups(slot.param for slot in self.slots))
        return self._groups[1]

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

    def open(self, scale: Scale, is_bystander: bool = False) -> None:
        """Before a backward pass at ``scale``: stash the gradients that are there, or bring those that stay to it.

        `refuse_unseen_writes` comes before: of several optimizers none is opened where one has to be refused.
        """
        self._unconvert()
        if self.clip is not None:
            self._clip_in_place()
        self.is_open, self.is_bystander = True, is_bystander
        if self.stays:
            self._rescale(scale)
            return
        for slot in self.slots:
            gradient = slot.param.grad
            if gradient is not None:
                # The next backward pass overwrites DDP's buckets.
                slot.stash = gradient.clone() if self.in_buckets else gradient
                slot.param.grad = None
            elif slot.exact is not None:
                slot.exact = None

    @property
    def has_fresh(self) -> bool:
        """Whether the backward pass that just ran left gradients here."""
        return any(slot.param.grad is not None for slot in self.slots)

    def put_back(self, scale: Scale, done: set[Slot] | None = None) -> None:
        """After a backward pass at ``scale`` that failed: the gradients as they were before it.

        Where gradients stayed in ``param.grad``, what the pass had added to them stays too, unscaled.
        """
        self.is_open = False
        if self.delayed_scale is not None:
            self.delayed_scale = scale
        elif self.local:
            self.collect(scale, None, local=True)
        else:
            for slot in self._not_in(done):
                slot.param.grad, slot.stash = slot.stash, None

    def keep_scaled(self, scale: Scale) -> None:
        """After a backward pass with ``delay_unscale=True``: leave everything in ``param.grad``, at ``scale``."""
        for slot in self.slots:
            slot.exact = None
            if slot.stash is not None:
                _join(slot, scale)
        self.is_open = False
        self.delayed_scale = scale

    def collect(
        self,
        scale: Scale,
        check: Check | None,
        *,
        local: bool = False,
        exact_in_place: bool = False,
        done: set[Slot] | None = None,
        was_reached: Callable[[torch.Tensor], bool] | None = None,
    ) -> None:
        """After a backward pass at ``scale``: unscale fresh gradients, add them to those before, and check them on the way.

        ``exact_in_place`` says that ``scale`` is a power of two, so that bfloat16 can be divided by it without rounding. ``done``
        are slots that another optimizer has handled; those of several optimizers are added. ``was_reached`` tells whether the
        backward pass came to a parameter: one that has no gradient all the same was cleared inside of the block.
        """
        fresh, sums = [], []
        for slot in self._not_in(done):
            gradient, stash = slot.param.grad, slot.stash
            if stash is None:
                if gradient is not None:
                    fresh.append((slot, gradient))
            elif gradient is not None:
                sums.append((slot, gradient))
            else:
                slot.stash = None
                if was_reached is not None and was_reached(slot.param):
                    slot.clear()
                else:
                    slot.param.grad = stash
        inv = inverse(scale)
        if fresh:
            self._unscale(fresh, scale, inv, check, exact_in_place)
        if sums:
            self._add(sums, inv, check)
        if check is not None:
            for slot, _ in (*fresh, *sums):
                if slot.owners > 1:
                    slot.found_inf = check.found_inf
        self.is_open = False
        self.delayed_scale = None
        self.local = local
        self.used_flag = None

    def _unscale(self, fresh: list, scale: Scale, inv: Scale, check: Check | None, exact_in_place: bool) -> None:
        """Unscale gradients where they are. What is rounded on the way is kept as it was beside them."""
        if is_one(inv) and check is None:
            for slot, _ in fresh:
                slot.exact = None
            return
        params, inputs, outputs = [], [], []
        for slot, gradient in fresh:
            if gradient.layout is not torch.strided:
                self._unscale_sparse(slot, gradient, inv, check)
                continue
            output, slot.exact = gradient, None
            if slot.master is not None and not (is_one(inv) or (exact_in_place and gradient.dtype is torch.bfloat16)):
                if self.in_buckets or gradient._is_view():  # others see it there
                    kept = gradient.clone()
                else:
                    kept, output = gradient, torch.empty_like(gradient)
                    slot.param.grad = output
                slot.exact = Exact(kept, scale, Seen.now(output))
            params.append(slot.param)
            inputs.append(gradient)
            outputs.append(output)
        found_inf, first_bad = _places(check, params)
        kernels.multi_tensor_scale(inputs, outputs, inv, found_inf, first_bad)
        self._note_versions(fresh)

    def _add(self, sums: list[tuple[Slot, torch.Tensor]], inv: Scale, check: Check | None) -> None:
        """Add fresh gradients to stashed ones: in float32, where the parameter is in lower precision."""
        own, mastered = [], []
        for slot, gradient in sums:
            if slot.owners > 1 and slot.found_inf is not None:
                _drop_if(slot, slot.found_inf)
            if gradient.layout is not torch.strided or slot.stash.layout is not torch.strided:
                self._add_sparse(slot, gradient, inv, check)
            else:
                (own if slot.master is None else mastered).append((slot, gradient))
        if own:
            stashes = [slot.stash for slot, _ in own]
            found_inf, first_bad = _places(check, [slot.param for slot, _ in own])
            gradients = [gradient for _, gradient in own]
            kernels.multi_tensor_axpby(gradients, stashes, stashes, inv, 1.0, found_inf, first_bad=first_bad)
        if mastered:
            totals = self.in_float32_of([(slot, slot.stash) for slot, _ in mastered])
            found_inf, first_bad = _places(check, [slot.param for slot, _ in mastered])
            gradients = [gradient for _, gradient in mastered]
            kernels.multi_tensor_axpby(gradients, totals, totals, inv, 1.0, found_inf, first_bad=first_bad)
            kernels.multi_tensor_scale(totals, [slot.stash for slot, _ in mastered], 1.0)
            for (slot, _), total in zip(mastered, totals):
                slot.exact = Exact(total, 1.0, Seen.now(slot.stash))
        for slot, _ in sums:
            if slot.stash is not None:
                slot.param.grad, slot.stash = slot.stash, None

    def in_float32_of(
        self, gradients: list[tuple[Slot, torch.Tensor]], into: Callable | None = None
    ) -> list[torch.Tensor]:
        """These gradients of slots with masters as exactly as they are known, in tensors that nobody else holds.

        ``into`` gives the tensor for a slot; else it is that of the exact value where that is float32.
        """
        outputs, rounded, restored = [], [], {}
        for slot, gradient in gradients:
            exact = slot.exact
            if exact is not None and not exact.serves(gradient):
                exact = None
            if into is not None:
                output = into(slot)
            elif exact is not None and exact.values.dtype is torch.float32:
                output = exact.values
            else:
                output = torch.empty_like(gradient, dtype=torch.float32)
            outputs.append(output)
            if exact is None:
                rounded.append((gradient, output))
            else:
                key = (id(exact.scale), exact.rounded.is_still(gradient))
                restored.setdefault(key, (exact.scale, []))[1].append((gradient, exact.values, output))
        if rounded:
            kernels.multi_tensor_scale(*map(list, zip(*rounded)), 1.0)
        for (_, untouched), (scale, lists) in restored.items():
            kernels.multi_tensor_restore(*map(list, zip(*lists)), inverse(scale), zeros_count=not untouched)
        return outputs

    @staticmethod
    def _unscale_sparse(slot: Slot, gradient: torch.Tensor, inv: Scale, check: Check | None) -> None:
        # Coalesced in the target's precision: duplicate indices may add up beyond float16's range.
        total = gradient.to(slot.target.dtype).coalesce() * on(inv, gradient.device)
        if check is not None:
            finite = torch.isfinite(total._values()).all()
            check.found_inf.copy_(
                torch.maximum(check.found_inf, on((~finite).to(torch.float32), check.found_inf.device))
            )
        slot.param.grad = visible = total.to(slot.param.dtype)
        slot.exact = None if slot.master is None else Exact(total, 1.0, Seen.now(visible))

    def _add_sparse(self, slot: Slot, gradient: torch.Tensor, inv: Scale, check: Check | None) -> None:
        """Add where one or both are sparse; the sum is sparse where both are."""
        stash, slot.stash, before = slot.stash, None, slot.exact
        if before is not None and before.rounded.is_still(stash):
            stash = before.values * on(inverse(before.scale), before.values.device)
        slot.param.grad = gradient.to_sparse() if gradient.layout is torch.strided else gradient
        self._unscale_sparse(slot, slot.param.grad, inv, check)
        fresh = slot.param.grad if slot.exact is None else slot.exact.values
        both = stash.layout is not torch.strided and gradient.layout is not torch.strided
        total = fresh + stash if both else _dense(fresh).add_(_dense(stash).to(fresh.dtype))
        slot.param.grad = visible = total.to(slot.param.dtype)
        slot.exact = None if slot.master is None else Exact(total, 1.0, Seen.now(visible))

    @staticmethod
    def _note_versions(fresh: list[tuple[Slot, torch.Tensor]]) -> None:
        for slot, _ in fresh:
            if slot.exact is not None:
                slot.exact = slot.exact._replace(rounded=Seen.now(slot.exact.rounded.gradient))

    def _rescale(self, scale: Scale) -> None:
        """Bring the gradients that stay in ``param.grad`` to this scale."""
        factor = ratio(scale, 1.0 if self.delayed_scale is None else self.delayed_scale)
        if self.delayed_scale is not None:
            self.delayed_scale = scale
        if is_one(factor):
            return
        plain = []
        for slot in self.slots:
            gradient, exact = slot.param.grad, slot.exact
            slot.exact = None
            if gradient is None:
                continue
            if exact is None or gradient.layout is not torch.strided:
                plain.append(_values(gradient))
            else:
                zeros_count = not exact.rounded.is_still(gradient)
                inv = inverse(exact.scale)
                kernels.multi_tensor_restore(
                    [gradient], [exact.values], [gradient], inv, factor=factor, zeros_count=zeros_count
                )
        if plain:
            kernels.multi_tensor_scale(plain, plain, factor)

    # The step

    def convert(self) -> None:
        """Bring everything, unscaled and clipped, to where ``master_params`` and ordinary optimizers look for it."""
        clip, self.clip, self._clipped = self.clip, None, []
        fresh = []
        for slot in self.mastered:
            if slot.converted is not None:
                continue
            gradient, exact = slot.param.grad, slot.exact
            if gradient is None:
                slot.master.raw_grad = slot.exact = None
                continue
            slot.converted = Seen.now(gradient)
            if gradient.layout is not torch.strided:
                is_exact = exact is not None and exact.rounded.is_still(gradient)
                slot.master.raw_grad = exact.values if is_exact else gradient.to(slot.master.dtype)
            else:
                fresh.append((slot, gradient))
        if fresh:
            self.in_float32_of(fresh, into=_gradient_of_master)
            for slot, _ in fresh:
                slot.exact = None
        if clip is not None:
            _multiply(self._in_use(self.mastered), clip)

    def convert_for_reader(self) -> None:
        """Somebody looks at a master's gradient.

        There is nothing to be seen in a backward pass, nor while gradients wait at their scale; and a fused step needs nothing.
        """
        if not (self.is_open or self.is_stepping or self.delayed_scale is not None):
            self.convert()

    def refuse_unseen_writes(self) -> None:
        """Raise where the step would have to choose between what was written to a master's gradient and to the model's."""
        for slot in self.mastered:
            converted = slot.converted
            if converted is None:
                continue
            gradient = slot.param.grad
            if converted.is_still(gradient):
                continue
            if gradient is None or not _values(gradient).any():  # clearing the model's gradient clears the master's
                slot.master.raw_grad = slot.converted = slot.exact = None
            else:
                raise ConfigurationError(
                    f"The gradient of a parameter of shape {tuple(slot.param.shape)} was written to after the gradients of the "
                    "masters had been looked at (ampkit.master_params, or the parameters of the optimizer's groups), and the "
                    "step can use one of them only. Write to the model's gradients first, or to the masters' alone."
                )
        for slot, before in self._clipped:
            if slot.param.grad is not None and not before.is_still(slot.param.grad):
                raise ConfigurationError(
                    f"The gradient of a parameter of shape {tuple(slot.param.shape)} was written to after "
                    "ampkit.clip_grad_norm_. Clip last, after every backward pass and every change of gradients."
                )

    def end_step(self) -> None:
        """After a step the model's gradients count again, unclipped: the next backward pass adds to them."""
        self.clip, self._clipped = None, []
        for slot in self.mastered:
            slot.converted = None

    def in_float32(self, slots: list[Slot]) -> list[torch.Tensor]:
        """The gradients of these slots as exactly as they are known."""
        return self.in_float32_of([(slot, slot.param.grad) for slot in slots])

    def _convert_exact(self) -> None:
        """Convert the gradients of which more is known than the model's gradient holds."""
        exact = [(slot, slot.param.grad) for slot in self.mastered if slot.exact is not None and slot.converted is None]
        exact = [(slot, gradient) for slot, gradient in exact if gradient is not None]
        self.in_float32_of(exact, into=_gradient_of_master)
        for slot, gradient in exact:
            slot.converted = Seen.now(gradient)

    def clip_by(self, coefficient: torch.Tensor) -> None:
        """Have every gradient multiplied by this: those of masters by the step, where it reads the model's as they are."""
        own = [slot.param.grad for slot in self.slots if slot.master is None and slot.param.grad is not None]
        _multiply(own, coefficient)
        if not self.mastered:
            return
        self.clip = coefficient if self.clip is None else self.clip * coefficient
        if self.reads_lower and not any(slot.owners > 1 for slot in self.mastered):
            self._clipped = [(slot, Seen.now(slot.param.grad)) for slot in self.mastered if slot.converted is None]
        else:
            self.convert()

    def total_norm(self) -> torch.Tensor | None:
        """The Euclidean norm of all gradients, unscaled and clipped so far: float32, shape [1]; None without gradients."""
        if any(slot.exact is not None for slot in self.mastered):
            self._convert_exact()
        if self.clip is None:
            return _norm(self._in_use(self.slots))
        clipped = _norm(self._in_use(self.mastered))
        own = _norm(self._in_use([slot for slot in self.slots if slot.master is None]))
        if clipped is not None:
            clipped = clipped * on(self.clip, clipped.device)
        return own if clipped is None else clipped if own is None else _norm([own, on(clipped, own.device)])

    @staticmethod
    def _in_use(slots: list[Slot]) -> list[torch.Tensor]:
        """The gradients that a step would use, where they are now."""
        found = []
        for slot in slots:
            gradient = slot.master.raw_grad if slot.converted is not None else slot.param.grad
            if gradient is not None:
                found.append(gradient)
        return found

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
            elif gradient is None or total.layout is not torch.strided:
                slot.param.grad = gradient = total.to(slot.param.dtype)
                slot.exact = Exact(total, 1.0, Seen.now(gradient))
            else:
                again.append((slot, total, gradient))
        if again:
            kernels.multi_tensor_scale([total for _, total, _ in again], [gradient for _, _, gradient in again], 1.0)
            for slot, total, gradient in again:
                slot.exact = Exact(total, 1.0, Seen.now(gradient))

    def _clip_in_place(self) -> None:
        """Clip now what no step has clipped."""
        self.convert()
        self._unconvert()

    # Clearing

    def drop_cleared(self) -> bool:
        """What was found about gradients goes with them. Returns whether there are none."""
        is_empty = self._is_empty()
        if is_empty:
            self.delayed_scale, self.local = None, False
            self._forget_findings()
        return is_empty

    def clear_all(self) -> None:
        """``zero_grad()`` of the optimizer."""
        self.delayed_scale, self.local = None, False
        self._forget_findings()
        for slot in self.slots:
            slot.param.grad = None
            slot.clear()
        for slot in self.mastered:
            slot.master.raw_grad = None

    def clear_params(self, set_to_none: bool = True, only: set[torch.Tensor] | None = None) -> None:
        """The part of ``zero_grad`` that nobody else sees: gradients set aside, and those on the far side of a master.

        ``only`` names the parameters of a model whose own ``zero_grad`` was called; None means all of the optimizer's.
        """
        if only is None:
            self.delayed_scale, self.local = None, False
            self._forget_findings()
        for slot in self.slots:
            if only is not None and slot.param not in only:
                continue
            slot.clear()
            if slot.master is None:
                continue
            slot.master.raw_grad = None
            if only is None and slot.param.grad is not None:
                if set_to_none:
                    slot.param.grad = None
                else:
                    slot.param.grad.detach_().zero_()
        if only is not None and self._is_empty():
            self._forget_findings()

    def drop_overflowed(self, flags: Iterable[torch.Tensor] = ()) -> None:
        """After a skipped step: its gradients are not finite and of no use to anyone, least of all to the next step.

        What several optimizers share stays where its last contribution was not one of those found not to be finite.
        """
        self._forget_findings()
        flags = list(flags)
        for slot in self.slots:
            if slot.owners > 1 and slot.found_inf is not None and not any(flag is slot.found_inf for flag in flags):
                continue
            slot.clear()
            if slot.master is not None:
                slot.master.raw_grad = None
            gradient = slot.param.grad
            if gradient is None:
                continue
            if gradient.layout is torch.strided:
                gradient.detach().zero_()  # where it is: it may be part of a script's flat buffer
            else:
                slot.param.grad = torch.zeros_like(gradient)

    def drop_known_overflow(self) -> None:
        """Drop gradients that nobody has cleared since a step that turned out, without waiting, to have been skipped."""
        known = [verdict for verdict in self.used_by if verdict.is_known and verdict.overflowed]
        if known:
            self.drop_overflowed([verdict.found_inf for verdict in known])

    def first_non_finite(self) -> torch.Tensor | None:
        """The first parameter whose gradient holds an inf or a NaN, in the optimizer's order. Reads from the device."""
        for slot in self.slots:
            gradient = slot.param.grad
            if gradient is not None and not torch.isfinite(local(_values(gradient))).all():
                return slot.param
        return None

    def _forget_findings(self) -> None:
        self.clip = self.used_flag = None
        self.used_by, self._clipped = [], []

    def _not_in(self, done: set[Slot] | None) -> list[Slot]:
        """The slots that no other optimizer has handled; from now on nobody else does."""
        if done is None:
            return self.slots
        remaining = [slot for slot in self.slots if slot not in done]
        done.update(slot for slot in remaining if slot.owners > 1)
        return remaining

    def _is_empty(self) -> bool:
        """Whether there is no gradient in the model, nor one set aside."""
        for slot in self.slots:
            if slot.param.grad is not None or slot.stash is not None:
                return False
        return True


def _places(check: Check | None, params: list[torch.Tensor]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if check is None else (check.found_inf, check.watch(params))


def _gradient_of_master(slot: Slot) -> torch.Tensor:
    """The tensor for a master's gradient, made where there is none yet."""
    move_like(slot.master, slot.param)
    gradient = slot.master.raw_grad
    if gradient is None or gradient.layout is not torch.strided:
        gradient = slot.master.raw_grad = torch.empty_like(slot.master)
    return gradient


def _join(slot: Slot, scale: Scale) -> None:
    """Add what was stashed, times ``scale``, to the fresh gradient."""
    stash, slot.stash = slot.stash, None
    gradient = slot.param.grad
    if gradient is None:
        slot.param.grad = stash * on(scale, stash.device)
    elif isinstance(scale, torch.Tensor) and gradient.layout is stash.layout is torch.strided:
        kernels.multi_tensor_axpby([gradient], [stash], [gradient], 1.0, scale)  # add_(alpha=tensor) would read it
    else:
        gradient.add_(stash * on(scale, stash.device))


def _drop_if(slot: Slot, found_inf: torch.Tensor) -> None:
    """A contribution that was not finite is no part of the sum."""
    slot.stash = torch.where(on(found_inf, slot.stash.device) != 0, torch.zeros_like(slot.stash), slot.stash)
    slot.exact = None


def _multiply(gradients: list[torch.Tensor], factor: Scale) -> None:
    if gradients:
        values = [_values(gradient) for gradient in gradients]
        kernels.multi_tensor_scale(values, values, factor)


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor | None:
    """The Euclidean norm of all of these together, on all processes: float32, shape [1]; None of none."""
    if not gradients:
        return None
    values = [_values(gradient) for gradient in gradients]
    if not any(map(is_sharded, values)):
        return kernels.multi_tensor_l2norm(values)[0]
    squares = 0.0
    for parts, groups in by_placement(values):
        squares = squares + total_over(groups, kernels.multi_tensor_l2norm(parts)[0].double().square())
    return squares.sqrt().float()


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """What a gradient stores: all of it, or the values of a sparse one."""
    return gradient if gradient.layout is torch.strided else gradient._values()
