"""The gradients of one optimizer, from the backward pass to the step.

Between two steps a gradient may be in one of three places: fresh and scaled in ``param.grad``; unscaled in ``target.grad``
(the master's, or the parameter's own where it has no master); or set aside while a backward pass runs, so that fresh
gradients arrive unmixed. `Gradients` moves them, one multi-tensor pass at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .. import kernels
from ..models.weights import move_like
from .master import COLLECTED, Slot, mark_collected


class Gradients:
    """Set aside, collect, put back: the verbs of ``scale_loss`` on the gradients of one optimizer.

    ``delayed`` says that scaled gradients wait in ``param.grad`` (``delay_unscale=True``). ``local`` says that they come
    from a backward pass under ``DDP.no_sync()``: only what is in ``param.grad`` will be reduced, so they must stay there
    and take part in the next backward pass. While either holds, gradients stay; otherwise they are set aside.

    ``done`` arguments: parameters already handled in this pass, for optimizers that share some; None for one optimizer.
    """

    def __init__(self, slots: list[Slot]) -> None:
        self.slots = slots
        self.is_open = False
        self.delayed = False
        self.local = False
        # Whether gradients are views of DDP's buckets, which it may replace by others with the same values.
        self.in_buckets = False
        # The scales at which gradients stand in param.grad, of parameters without and with a master.
        self._own_scale = 1.0
        self._low_scale = 1.0

    def open(self, scale: float) -> None:
        """Before a backward pass at ``scale``: bring gradients that stay to it, set the others aside."""
        self._opened_from = (self._own_scale, self._low_scale)
        if self.uncollected():
            self.collect(1.0, None)
        self.is_open = True
        if self.delayed or self.local:
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
            self._rescale(*self._opened_from)
            return
        for slot in self._remaining(done):
            if slot.aside is not None or slot.param.grad is not None:
                slot.param.grad, slot.aside = slot.aside, None

    def keep_scaled(self, scale: float) -> None:
        """After a backward pass with ``delay_unscale=True``: leave everything in ``param.grad``, at ``scale``."""
        for slot in self.slots:
            if slot.master is None:
                _join(slot, scale)
            elif slot.param.grad is not None:
                slot.aside = None  # else it stays as the sign that the master's gradient was not cleared
        self.is_open = False
        self.delayed = True
        self._own_scale = self._low_scale = scale

    def collect(
        self,
        scale: float,
        found_inf: torch.Tensor | None,
        *,
        local: bool = False,
        done: set[torch.Tensor] | None = None,
    ) -> None:
        """After a backward pass at ``scale``: unscale fresh gradients into their targets, adding to what was there.

        One pass over the fresh gradients checks them (into ``found_inf``), converts and unscales. Under ``no_sync``
        (``local``) ``param.grad`` holds the sum of all micro-batches so far, and replaces what the master had.
        """
        replace = self.local or local
        fresh, fresh_out, added, before = [], [], [], []
        for slot in self._remaining(done):
            if local:
                _join(slot, scale if slot.master is None else scale / self._low_scale)
            aside, slot.aside = slot.aside, None
            gradient = slot.param.grad
            if gradient is None:
                slot.param.grad = aside
                continue
            standing = aside if slot.master is None else (None if replace else slot.master.grad)
            if standing is not None and standing.layout is not gradient.layout:
                standing = standing.to_dense()
                gradient = gradient if gradient.layout is torch.strided else gradient.to_dense()
                if slot.master is not None:
                    slot.master.grad = standing
            if gradient.layout is not torch.strided:
                _collect_sparse(slot, gradient, standing, 1.0 / scale, found_inf)
            elif standing is None:
                fresh.append(gradient)
                fresh_out.append(_target_gradient(slot, gradient))
            else:
                added.append(gradient)
                before.append(standing)
                if slot.master is None:
                    slot.param.grad = standing
            if slot.master is not None:
                mark_collected(gradient)
        if scale == 1.0 and found_inf is None:
            fresh, fresh_out = _without_itself(fresh, fresh_out)
        kernels.multi_tensor_scale(fresh, fresh_out, 1.0 / scale, found_inf)
        kernels.multi_tensor_axpby(added, before, before, 1.0 / scale, 1.0, found_inf)
        self.is_open = False
        self.delayed = False
        self.local = local
        self._own_scale, self._low_scale = 1.0, scale

    @property
    def waiting_scale(self) -> float:
        """The scale of gradients that wait after ``delay_unscale=True``."""
        return self._low_scale

    def uncollected(self) -> bool:
        """Whether the model holds gradients that never went through ``scale_loss``, and so never reached a master."""
        return not self.delayed and any(
            slot.master is not None
            and slot.master.grad is None
            and slot.param.grad is not None
            and not hasattr(slot.param.grad, COLLECTED)
            for slot in self.slots
        )

    def drop_cleared(self) -> None:
        """Clearing a model's gradients clears the masters' too, and a new gradient makes the master's old one void."""
        empty = True
        for slot in self.slots:
            gradient, master = slot.param.grad, slot.master
            if gradient is not None:
                empty = False
            if master is None or master.grad is None or slot.aside is not None:
                continue
            is_new = gradient is not None and not (self.delayed or self.in_buckets or hasattr(gradient, COLLECTED))
            if gradient is None or is_new:
                master.grad = None
            elif getattr(gradient, COLLECTED, gradient._version) != gradient._version and not _values(gradient).any():
                # zero_grad(set_to_none=False): a counted write that left nothing but zeros.
                master.grad = None
        if empty and not any(slot.aside is not None for slot in self.slots):
            self.delayed = self.local = False

    def clear_params(self, set_to_none: bool = True, only: set[torch.Tensor] | None = None) -> None:
        """The part of ``zero_grad`` that nobody else sees: gradients set aside, and those on the far side of a master.

        ``only`` names the parameters of a model whose own ``zero_grad`` was called; None means all of the optimizer's.
        """
        if only is None:
            self.delayed = self.local = False
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
        for slot in self.slots:
            if slot.master is not None:
                slot.master.grad = None
            elif slot.param.grad is not None:
                slot.param.grad = torch.zeros_like(slot.param.grad)

    def first_non_finite(self) -> torch.Tensor | None:
        """The first parameter whose gradient holds an inf or a NaN, in the optimizer's order. Reads from the device."""
        for slot in self.slots:
            for gradient in (slot.target.grad, slot.param.grad):
                if gradient is not None and not torch.isfinite(_values(gradient)).all():
                    return slot.param
        return None

    def _rescale(self, own_scale: float, low_scale: float) -> None:
        """Bring the gradients that stay in ``param.grad`` to these scales."""
        for has_master, factor in ((False, own_scale / self._own_scale), (True, low_scale / self._low_scale)):
            if factor != 1.0:
                gradients = [
                    slot.param.grad
                    for slot in self.slots
                    if (slot.master is not None) is has_master and slot.param.grad is not None
                ]
                values = [_values(gradient) for gradient in gradients]
                kernels.multi_tensor_scale(values, values, factor)
        self._own_scale, self._low_scale = own_scale, low_scale

    def _remaining(self, done: set[torch.Tensor] | None) -> Iterator[Slot]:
        if done is None:
            yield from self.slots
            return
        for slot in self.slots:
            if slot.param not in done:
                done.add(slot.param)
                yield slot


def _join(slot: Slot, factor: float) -> None:
    """Add what was set aside, times ``factor``, to the fresh gradient."""
    if slot.aside is not None:
        if slot.param.grad is None:
            slot.param.grad = slot.aside * factor
        else:
            slot.param.grad.add_(slot.aside, alpha=factor)
        slot.aside = None


def _target_gradient(slot: Slot, gradient: torch.Tensor) -> torch.Tensor:
    if slot.master is None:
        return gradient
    move_like(slot.master, slot.param)
    if slot.master.grad is None or slot.master.grad.layout is not torch.strided:
        slot.master.grad = torch.empty_like(slot.master)
    return slot.master.grad


def _collect_sparse(
    slot: Slot, gradient: torch.Tensor, standing: torch.Tensor | None, factor: float, found_inf: torch.Tensor | None
) -> None:
    # Coalesced in the target's precision: duplicate indices may add up beyond float16's range.
    total = gradient.to(slot.target.dtype).coalesce() * factor
    if found_inf is not None:
        finite = torch.isfinite(total._values()).all()
        found_inf.copy_(torch.maximum(found_inf, (~finite).to(found_inf)))
    slot.target.grad = total if standing is None else standing + total


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.layout is torch.strided else gradient._values()


def _without_itself(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> tuple[list, list]:
    """Copying a tensor onto itself, unscaled and unchecked, is no work."""
    pairs = [(x, y) for x, y in zip(inputs, outputs) if x is not y]
    return [x for x, _ in pairs], [y for _, y in pairs]
