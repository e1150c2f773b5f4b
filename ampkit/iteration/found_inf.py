"""Unscaling and checking of gradients: kernels write flags on their device, and the host reads one only where it must."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import kernels
from ..casting.narrow_gradients import is_set_aside
from ..errors import ConfigurationError
from ..models.float32_values import Float32Value, clear_gradient, put_gradient
from ..optimizers.scales import Scale, moved_to
from ..sharding import highest, local


@dataclass(eq=False, slots=True, weakref_slot=True)
class Slot:
    """A parameter and its gradient: unscaled in ``param.grad`` after a block, in ``stash`` while another block is open.

    ``master`` is the float32 value of a weight with a rest, whose gradient may be float32 too. ``owners`` counts the optimizers.
    """

    param: torch.Tensor
    master: Float32Value | None = None
    owners: int = 0
    stash: torch.Tensor | None = None

    def drop_stash(self) -> None:
        """Drop what was set aside, and the note of it: zeros that are written in place write no None to ``param.grad``."""
        self.stash = None
        is_set_aside(self.param)  # which clears the note


SlotGradient = tuple[Slot, torch.Tensor]


class FoundInf:
    """The flag (float32, shape []) of a ``scale_loss`` block, or of several: not 0 where a gradient is not finite.

    `places_for` gives kernels a place for the index of the first such tensor of a list.
    """

    is_clean = False  # whether the host knows that all were finite: on the CPU, where `agree` need not wait
    loss: torch.Tensor | None = None  # of the last block
    iteration: int | None = None  # its number, from 1, among the scaler's iterations; None in a CUDA graph
    moves_scale = False  # whether a scale has moved by it
    scaler: Any = None  # the loss scaler whose delayed check it is

    def __init__(self, flag: torch.Tensor, name_of: Callable[[Any], str] = repr) -> None:
        self.flag, self._name_of = flag, name_of
        self.lists: list[tuple[Sequence[torch.Tensor], torch.Tensor]] = []

    def agree(self, groups: Iterable[Any] = ()) -> None:
        """End the check. Processes of ``groups`` step together or not at all, so a flag that is set on one is set on all."""
        if groups:
            highest(self.flag, groups)
        self.is_clean = is_known_clean(self.flag)

    @functools.cached_property
    def overflowed(self) -> bool:
        """Whether the flag is set. Waits for the device."""
        return not self.is_clean and is_set(self.flag)

    def sum_of_loss(self) -> float:
        """The sum of the loss: finite if all of it is, and 0.0 where no loss is known."""
        return 0.0 if self.loss is None else arrived(self.loss)

    def cause(self) -> str:
        """The iteration and its origin, ``iteration 7: the gradient of 'fc.weight'``, for a flag that the host knows."""
        known = [f"iteration {self.iteration}"] if self.iteration else []
        if not math.isfinite(loss := self.sum_of_loss()):
            return ": ".join([*known, f"the loss is {loss}"])
        for tensors, index in self.lists:
            if 0 <= (first := int(arrived(index))) < len(tensors):
                return ": ".join([*known, f"the gradient of {self._name_of(tensors[first])}"])
        return "".join(known)

    @classmethod
    def any_of(cls, findings: Sequence[FoundInf]) -> FoundInf:
        """Combine flags into one, on the device of the first that is not known to be clean."""
        if len(findings) == 1:
            return findings[0]
        first, *further = [finding for finding in findings if not finding.is_clean] or findings[:1]
        flag = first.flag
        if further:
            flag = torch.stack([flag, *[moved_to(finding.flag, flag.device) for finding in further]]).amax(0)
        combined = cls(flag, first._name_of)
        combined.lists = [pair for finding in (first, *further) for pair in finding.lists]
        combined.is_clean = first.is_clean
        return combined


def arrived(tensor: torch.Tensor) -> float:
    """The sum of a tensor that its device is known to have computed. Does not wait for work that was queued since."""
    values = local(tensor)
    if values.is_cuda:
        with torch.cuda.stream(_beside(values.device)):
            copy, copied = torch.empty_like(values, device="cpu", pin_memory=True), torch.cuda.Event()
            copy.copy_(values, non_blocking=True)
            copied.record()
        copied.synchronize()
        values = copy
    return float(values.double().sum().item())


@functools.cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@functools.cache
def constant(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A cached tensor of shape [], to be cloned: that takes a third of the time of making one."""
    return torch.full((), value, dtype=dtype, device=device)


def is_capturing(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def refuse_to_read(tensor: torch.Tensor) -> None:
    if is_capturing(tensor):
        raise ConfigurationError(
            "While a CUDA graph is captured the host cannot learn whether gradients are finite, and something asks: the step of an "
            "ordinary optimizer, step_was_skipped() or state_dict(). Steps of ampkit.optimizers, and of torch's SGD, Adam and "
            "AdamW with fused=True, are decided on the device; with loss_scale=1.0 and check_gradients=False nothing is."
        )


def is_set(flag: torch.Tensor) -> bool:
    """Whether a flag is not 0. Waits for its device."""
    refuse_to_read(flag)
    return flag.item() != 0.0


def is_known_clean(flag: torch.Tensor) -> bool:
    """Whether the host can tell without waiting that a flag is 0: on the CPU."""
    return flag.is_cpu and flag.item() == 0.0


def places_for(
    finding: FoundInf | None, tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The ``found_inf`` and ``first_bad`` (int64, shape []) of a kernel over these tensors; None where nothing is checked."""
    if finding is None or not tensors:
        return None, None
    index = constant(kernels.NO_BAD, torch.int64, finding.flag.device).clone()
    finding.lists.append((tensors, index))
    return finding.flag, index


def inverse(scale: Scale) -> Scale:
    return scale.reciprocal() if isinstance(scale, torch.Tensor) else 1.0 / scale


def is_sparse(gradient: torch.Tensor) -> bool:
    return gradient.layout is not torch.strided


def values_of(gradient: torch.Tensor) -> torch.Tensor:
    """The elements that a gradient stores: all of a dense one, the values of a sparse one."""
    return gradient if gradient.layout is torch.strided else gradient._values()


def bring_to(slots: list[Slot], old: Scale, new: Scale) -> None:
    """Bring gradients that stay in ``.grad`` to a new scale, in their weights' precision: the backward pass adds to them in it."""
    factor = 1.0 if new is old else new / (moved_to(old, new.device) if isinstance(new, torch.Tensor) else old)
    is_one = not isinstance(factor, torch.Tensor) and factor == 1.0
    inputs, outputs = [], []
    for slot in slots:
        gradient = slot.param.grad
        if gradient is None:
            continue
        if gradient.dtype is not slot.param.dtype and slot.master is not None and not is_sparse(gradient):
            clear_gradient(slot.param)
            slot.param.grad = torch.empty_like(gradient, dtype=slot.param.dtype)
        elif is_one:
            continue
        inputs.append(values_of(gradient))
        outputs.append(values_of(slot.param.grad))
    kernels.multi_tensor_scale(inputs, outputs, factor)


def unscale(fresh: list[SlotGradient], inv: Scale, finding: FoundInf | None) -> None:
    """Multiply gradients by ``inv`` in place, or into float32 where the weight's precision cannot hold the result."""
    if finding is None and not isinstance(inv, torch.Tensor) and inv == 1.0:
        return
    params, inputs, outputs, is_in_place = [], [], [], True
    for slot, gradient in fresh:
        output = gradient
        dtype = gradient.dtype if slot.master is None else torch.float32
        if gradient.layout is not torch.strided:  # sparse: duplicate indices may add up beyond float16's range
            total = gradient.detach().to(dtype).coalesce()
            put_gradient(slot.param, total)
            output = gradient = total._values()
        elif gradient.grad_fn is not None:
            # After backward(create_graph=True): for autograd too, since a script may differentiate p.grad again.
            with torch.enable_grad():
                put_gradient(slot.param, gradient.to(dtype) * moved_to(inv, gradient.device))
            gradient, output = gradient.detach(), slot.param.grad.detach()
        elif slot.master is not None and gradient.dtype is torch.float16:
            output = torch.empty_like(gradient, dtype=torch.float32)
            put_gradient(slot.param, output)
        is_in_place = is_in_place and output is gradient
        params.append(slot.param)
        inputs.append(gradient)
        outputs.append(output)
    kernels.multi_tensor_scale(inputs, inputs if is_in_place else outputs, inv, *places_for(finding, params))


def add_to_stashes(sums: list[SlotGradient], inv: Scale, finding: FoundInf | None) -> None:
    """Unscale fresh gradients and add them to stashed ones: in float32, where the weight's value is float32."""
    apart = [(slot, gradient) for slot, gradient in sums if _is_for_torch(gradient) or _is_for_torch(slot.stash)]
    if apart:
        unscale(apart, inv, finding)
    params, fresh, stashes, totals = [], [], [], []
    for slot, gradient in sums:
        total = stash = slot.stash
        slot.stash = None
        if _is_for_torch(gradient) or _is_for_torch(stash):
            dtype = stash.dtype if slot.master is None else torch.float32
            put_gradient(slot.param, _sum(slot.param.grad, stash, dtype))
            continue
        is_of_script = stash._is_view()  # a view of a flat buffer: autograd leaves no views
        if slot.master is not None and stash.dtype is not torch.float32 and not is_of_script:
            total = torch.empty_like(stash, dtype=torch.float32)
        put_gradient(slot.param, total)
        params.append(slot.param)
        fresh.append(gradient)
        stashes.append(stash)
        totals.append(total)
    flag, first_bad = places_for(finding, params)
    kernels.multi_tensor_axpby(fresh, stashes, totals, inv, 1.0, flag, 0, first_bad)


def _is_for_torch(gradient: torch.Tensor) -> bool:
    """Whether torch has to add this gradient up, since it is sparse, or autograd has recorded it."""
    return is_sparse(gradient) or gradient.grad_fn is not None


@torch.enable_grad()
def _sum(gradient: torch.Tensor, stash: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum of two gradients, sparse where both are."""
    if is_sparse(gradient) is not is_sparse(stash):
        gradient, stash = (x.to_dense() if is_sparse(x) else x for x in (gradient, stash))
    return gradient.to(dtype) + stash.to(dtype)
