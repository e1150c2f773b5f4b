"""The gradients of one optimizer, from the backward pass to the step.

After a `scale_loss` block ``param.grad`` is the unscaled gradient, and the only one: what a script writes there counts at the
step as it does in torch. It is float32 where the weight's precision cannot hold it (float16 at a loss scale, a sum of several
blocks), which ``Tensor.grad_dtype`` allows, and else what the backward pass left, in place. All of it is done by multi-tensor
passes, and never waits for a device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .. import kernels
from ..casting.narrow_gradients import is_set_aside, note_set_aside
from ..models.float32_values import forget_gradient, put_gradient
from ..optimizers.scales import Scale, is_one, on, ratio
from ..sharding import by_placement, is_sharded, process_groups, total_over
from .clipping import Clipping
from .found_inf import FoundInf, places_for
from .slots import BackwardPass, Slot, is_sparse, values_of

SlotGradient = tuple[Slot, torch.Tensor]

_CPU = torch.device("cpu")


class Gradients:
    """Stash, collect, clip: the verbs of an iteration on the gradients of one optimizer.

    ``delayed_scale`` is the scale at which gradients wait in ``param.grad`` (``delay_unscale=True``), else None. ``local`` says
    that they come from a backward pass under ``DDP.no_sync()``: only what is in ``param.grad`` will be reduced. While either
    holds, gradients stay there during the next backward pass; otherwise they are stashed, so that fresh ones arrive unmixed.
    ``process_groups`` are the groups of processes that have to agree whether to step: the ``process_group`` of `initialize`, and
    those that the parameters lie on.
    """

    def __init__(self, process_group: Any = None) -> None:
        self.slots: list[Slot] = []
        self.mastered: list[Slot] = []  # those whose float32 value is a weight and a rest
        self.process_groups = self._of_script = [] if process_group is None else [process_group]
        self.is_open = False
        self.delayed_scale: Scale | None = None
        self.local = False
        self.clipping = Clipping()
        # Whether gradients are views of DDP's buckets, which it may replace by others with the same values.
        self.in_buckets = False

    def add(self, slots: Iterable[Slot]) -> None:
        """From now on these parameters' gradients too, once each; where ``slots`` raises, those before stay added."""
        known = set(self.slots)
        for slot in slots:
            if slot not in known:
                known.add(slot)
                slot.owners += 1
                self.slots.append(slot)
                if slot.entry is not None:
                    self.mastered.append(slot)
        self.process_groups = list(
            dict.fromkeys([*process_groups(slot.param for slot in self.slots), *self._of_script])
        )

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

    # The backward pass

    @property
    def stays(self) -> bool:
        """Whether gradients stay in ``param.grad`` while the next backward pass adds to them."""
        return self.delayed_scale is not None or self.local

    def open(self, scale: Scale, is_empty: bool = False) -> None:
        """Before a backward pass at ``scale``: stash the gradients that are there, or bring those that stay to it.

        ``is_empty``, which `drop_cleared` returns, says that there are none.
        """
        if self.clipping.pending is not None:
            self.widen()
        self.is_open = True
        if self.stays:
            factor = ratio(scale, 1.0 if self.delayed_scale is None else self.delayed_scale)
            if self.delayed_scale is not None:
                self.delayed_scale = scale
            self._bring_to(factor)
            return
        for slot in () if is_empty else self.slots:
            gradient = slot.param.grad
            if gradient is not None:
                slot.stash = gradient
                forget_gradient(slot.param)
                note_set_aside(slot.param)
                if self.in_buckets and gradient.dtype is slot.param.dtype:  # which the next backward pass overwrites
                    slot.stash = gradient.clone()

    def set_aside(self) -> None:
        """Stash gradients in another dtype than their weights', with which dynamo does not trace. `bring_back` is the undo."""
        for slot in () if self.is_open else self.mastered:
            gradient = slot.param.grad
            if gradient is not None and gradient.dtype is not slot.param.dtype and not self.stays:
                slot.stash = gradient
                forget_gradient(slot.param)

    def bring_back(self) -> None:
        """Have what was set aside be ``param.grad`` again, unless a script has put another gradient there."""
        for slot in () if self.is_open else self.mastered:
            if slot.stash is not None:
                if slot.param.grad is None:
                    put_gradient(slot.param, slot.stash)
                slot.stash = None

    def _bring_to(self, factor: Scale) -> None:
        """Multiply gradients that stay, in the precision of their weights, in which the backward pass adds to them."""
        inputs, outputs = [], []
        for slot in self.slots:
            gradient = slot.param.grad
            if gradient is None:
                continue
            if gradient.dtype is not slot.param.dtype and slot.entry is not None and not is_sparse(gradient):
                forget_gradient(slot.param)
                slot.param.grad = torch.empty_like(gradient, dtype=slot.param.dtype)
            elif is_one(factor):
                continue
            inputs.append(values_of(gradient))
            outputs.append(values_of(slot.param.grad))
        kernels.multi_tensor_scale(inputs, outputs, factor)

    @property
    def has_fresh(self) -> bool:
        """Whether the backward pass that just ran left gradients here."""
        for slot in self.slots:
            if slot.gradient is not None:
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
            for slot in _without_cleared(backward.take(self.slots)):
                _put_stash_back(slot)

    def keep_scaled(self, scale: Scale) -> None:
        """After a backward pass with ``delay_unscale=True``: leave everything in ``param.grad``, at ``scale``."""
        fresh, stashes = [], []
        for slot in _without_cleared(self.slots):
            gradient, stash, slot.stash = slot.param.grad, slot.stash, None
            if stash is None:
                continue
            if gradient is None:
                gradient = slot.param.grad = torch.zeros_like(stash, dtype=slot.param.dtype)
            if gradient.layout is stash.layout is torch.strided:
                fresh.append(gradient)
                stashes.append(stash)
            else:
                slot.param.grad = gradient + (stash * on(scale, stash.device)).to(gradient.dtype)
        kernels.multi_tensor_axpby(fresh, stashes, fresh, 1.0, scale)
        self.is_open = False
        self.delayed_scale = scale

    def collect(self, backward: BackwardPass, found: FoundInf | None) -> None:
        """After a backward pass: unscale fresh gradients, add them to those before, and check them on the way."""
        fresh, sums = [], []
        for slot in _without_cleared(backward.take(self.slots)):
            gradient, stash = slot.param.grad, slot.stash
            if stash is None:
                if gradient is not None:
                    fresh.append((slot, gradient))
            elif gradient is not None:
                sums.append((slot, gradient))
            else:
                _put_stash_back(slot)
        if fresh:
            _unscale(fresh, backward, found)
        if sums:
            _add(sums, backward, found)
        if found is not None:
            for slot, _ in (*fresh, *sums):
                if slot.owners > 1:
                    slot.found_inf = found
        self.is_open = False
        self.delayed_scale = None
        self.local = backward.local

    # Between the block and the step

    def in_float32(self) -> dict[Slot, torch.Tensor]:
        """The gradients of weights with rests in float32, clipped: ``param.grad`` itself where it is that."""
        clip, found = self.clipping.pending, {}
        inputs, outputs = [], []
        for slot in self.mastered:
            gradient = slot.param.grad
            if gradient is None:
                continue
            if gradient.dtype is torch.float32 and clip is None:
                found[slot] = gradient
            elif is_sparse(gradient):
                found[slot] = gradient.float() if clip is None else gradient.float() * on(clip, gradient.device)
            else:
                found[slot] = torch.empty_like(gradient, dtype=torch.float32)
                inputs.append(gradient)
                outputs.append(found[slot])
        kernels.multi_tensor_scale(inputs, outputs, 1.0 if clip is None else clip)
        return found

    def widen(self) -> None:
        """Have ``param.grad`` of weights with rests be float32, and clipped: scripts read them as gradients of float32 values."""
        if self.is_open or self.delayed_scale is not None:
            return  # there is nothing to be seen in a backward pass, nor while gradients wait at their scale
        for slot, gradient in self.in_float32().items():
            put_gradient(slot.param, gradient)
        self.clipping.forget()

    def clip_by(self, coefficient: torch.Tensor) -> None:
        """Have every gradient multiplied by this: those of weights with rests by the step."""
        own = [
            values_of(gradient) for slot in self.slots if slot.entry is None and (gradient := slot.gradient) is not None
        ]
        kernels.multi_tensor_scale(own, own, coefficient)
        if self.mastered:
            self.clipping.add(coefficient, self.mastered)
            if any(slot.owners > 1 for slot in self.mastered):
                self.widen()

    def check(self, found: FoundInf) -> None:
        """Note in ``found`` what is not finite among the gradients of now, on this process."""
        there = [(slot.param, values_of(gradient)) for slot in self.slots if (gradient := slot.gradient) is not None]
        flag, first_bad = places_for(found, [param for param, _ in there])
        gradients = [gradient for _, gradient in there]
        kernels.multi_tensor_unscale_l2norm(gradients, found_inf=flag, first_bad=first_bad)

    def total_norm(self) -> torch.Tensor | None:
        """The Euclidean norm of all gradients, unscaled and clipped so far: float32, shape [1]; None without gradients."""
        clip = self.clipping.pending
        own, clipped = [], []
        for slot in self.slots:
            if (gradient := slot.gradient) is not None:
                (own if clip is None or slot.entry is None else clipped).append(values_of(gradient))
        norms = [norm for norm in (_norm_of(own), _norm_of(clipped)) if norm is not None]
        if clipped:
            norms[-1] = norms[-1] * on(clip, norms[-1].device)
        if len(norms) > 1:
            return kernels.multi_tensor_l2norm([on(norm, norms[0].device) for norm in norms])[0]
        return norms[0] if norms else None

    # Clearing

    def drop_cleared(self) -> bool:
        """A clipping goes with the gradients. Returns whether there are none."""
        is_empty = not self.has_fresh
        if is_empty:
            self.delayed_scale, self.local = None, False
            self.clipping.forget()
        else:
            self.clipping.check_writes(refuses=False)
        return is_empty

    def clear(self, set_to_none: bool, own: bool) -> None:
        """What ``zero_grad`` of torch does not see: stashed gradients, and the model's where the optimizer steps over others.

        With ``own`` it clears parameters without rests too, else the optimizer's own ``zero_grad`` does.
        """
        self.delayed_scale, self.local = None, False
        self.clipping.forget()
        for slot in self.slots:
            slot.clear()
            if own or slot.entry is not None:
                if set_to_none and slot.entry is None:
                    slot.param.grad = None
                elif set_to_none:
                    forget_gradient(slot.param)
                elif (gradient := slot.gradient) is not None:
                    if gradient.grad_fn is not None:
                        gradient.detach_()
                    gradient.requires_grad_(False).zero_()  # views cannot be detached in place

    def zero_where(self, flag: torch.Tensor) -> None:
        """Write zeros where ``flag`` is not 0, on its device. Gradients that several optimizers share have a flag of their own."""
        for slot in self.slots:
            slot.stash = None
            if slot.gradient is not None:
                found = flag if slot.found_inf is None else slot.found_inf.flag
                gradient = values_of(slot.gradient).detach()
                gradient.masked_fill_(on(found, gradient.device) != 0, 0.0)


def _without_cleared(slots: list[Slot]) -> list[Slot]:
    """These, without the stashes of parameters whose gradients a script has cleared since, ``p.grad = None``."""
    for slot in slots:
        if slot.stash is not None and not is_set_aside(slot.param):
            slot.stash = None
    return slots


def _put_stash_back(slot: Slot) -> None:
    """After a backward pass that made no gradient of this parameter: the one of before."""
    stash, slot.stash = slot.stash, None
    put_gradient(slot.param, stash)


def _unscale(fresh: list[SlotGradient], backward: BackwardPass, found: FoundInf | None) -> None:
    """Unscale gradients where they are, or into float32 where the weight's precision cannot hold the result."""
    inv = backward.inv
    if is_one(inv) and found is None:
        return
    inexact = (torch.float16,) if backward.exact_in_place else (torch.float16, torch.bfloat16)
    params, inputs, outputs, is_in_place = [], [], [], True
    for slot, gradient in fresh:
        output = gradient
        if gradient.layout is not torch.strided:
            _unscale_sparse(slot, gradient, inv, found)
            continue
        if gradient.grad_fn is not None:
            gradient, output = _put_recorded(slot, gradient, inv)
            is_in_place = False
        elif slot.entry is not None and gradient.dtype in inexact:
            output = torch.empty_like(gradient, dtype=torch.float32)
            put_gradient(slot.param, output)
            is_in_place = False
        params.append(slot.param)
        inputs.append(gradient)
        outputs.append(output)
    kernels.multi_tensor_scale(inputs, inputs if is_in_place else outputs, inv, *places_for(found, params))


def _add(sums: list[SlotGradient], backward: BackwardPass, found: FoundInf | None) -> None:
    """Add fresh gradients to stashed ones: in float32, where the weight's value is float32."""
    params, fresh, stashes, totals = [], [], [], []
    for slot, gradient in sums:
        if slot.owners > 1 and slot.found_inf is not None:
            _drop_if(slot, slot.found_inf.flag)
        if is_sparse(gradient) or is_sparse(slot.stash):
            _add_sparse(slot, gradient, backward.inv, found)
            continue
        total = stash = slot.stash
        is_of_script = stash._is_view()  # of a flat buffer: what autograd leaves is none
        if slot.entry is not None and stash.dtype is not torch.float32 and not is_of_script:
            total = torch.empty_like(stash, dtype=torch.float32)
        slot.stash = None
        if gradient.grad_fn is not None or stash.grad_fn is not None:
            gradient, total = _put_recorded(slot, gradient, backward.inv, stash)
        else:
            put_gradient(slot.param, total)
        params.append(slot.param)
        fresh.append(gradient)
        stashes.append(stash)
        totals.append(total)
    flag, first_bad = places_for(found, params)
    kernels.multi_tensor_axpby(fresh, stashes, totals, backward.inv, 1.0, flag, 0, first_bad)


def _put_recorded(
    slot: Slot, gradient: torch.Tensor, inv: Scale, stash: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """After ``backward(create_graph=True)``: unscale ``param.grad`` for autograd too, since a script may differentiate it again.

    Returns what the kernels, of which autograd knows nothing, read and write.
    """
    with torch.enable_grad():
        dtype = gradient.dtype if slot.entry is None else torch.float32
        total = gradient.to(dtype) * on(inv, gradient.device)
        if stash is not None:
            total = total + stash
    put_gradient(slot.param, total)
    return gradient.detach(), total.detach()


def _drop_if(slot: Slot, found_inf: torch.Tensor) -> None:
    """A contribution that was not finite is no part of the sum."""
    stash = slot.stash
    slot.stash = torch.where(on(found_inf, stash.device) != 0, torch.zeros_like(stash), stash)


def _norm_of(gradients: list[torch.Tensor]) -> torch.Tensor | None:
    """The Euclidean norm of all of these together, on all processes: float32, shape [1]; None of none."""
    if not gradients:
        return None
    if not any(map(is_sharded, gradients)):
        return kernels.multi_tensor_l2norm(gradients)[0]
    squares = 0.0
    for parts, groups in by_placement(gradients):
        squares = squares + total_over(groups, kernels.multi_tensor_l2norm(parts)[0].double().square())
    return squares.sqrt().float()


# Sparse gradients, which no multi-tensor kernel takes, one by one


def _unscale_sparse(slot: Slot, gradient: torch.Tensor, inv: Scale, found: FoundInf | None) -> None:
    """``gradient`` * ``inv`` becomes the slot's."""
    # Coalesced in the target's precision: duplicate indices may add up beyond float16's range.
    dtype = slot.param.dtype if slot.entry is None else torch.float32
    total = gradient.to(dtype).coalesce() * on(inv, gradient.device)
    if found is not None:
        finite = torch.isfinite(total._values()).all()
        found.flag.copy_(torch.maximum(found.flag, on((~finite).to(torch.float32), found.flag.device)))
    put_gradient(slot.param, total)


def _add_sparse(slot: Slot, gradient: torch.Tensor, inv: Scale, found: FoundInf | None) -> None:
    """``gradient`` * ``inv`` is added to the slot's stash. The sum is sparse where both are."""
    stash, slot.stash = slot.stash, None
    both = is_sparse(stash) and is_sparse(gradient)
    _unscale_sparse(slot, gradient if is_sparse(gradient) else gradient.to_sparse(), inv, found)
    fresh = slot.param.grad
    put_gradient(
        slot.param, fresh + stash.to(fresh.dtype) if both else _dense(fresh).add_(_dense(stash).to(fresh.dtype))
    )


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if is_sparse(gradient) else gradient
