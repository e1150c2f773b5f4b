"""Whether gradients are finite: written by kernels on their device, read by the host where it must.

A `FoundInf` is the flag of one block; `Findings` combine the flags of the blocks between two steps of an optimizer into the flag
of a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import kernels
from ..errors import ConfigurationError
from ..optimizers.scales import on
from ..sharding import highest, local
from .clipping import Seen, is_still, seen
from .slots import values_of


class FoundInf:
    """The flag that kernels set in one ``scale_loss`` block, or in several with ``delay_overflow_check=True``.

    ``flag`` (float32, shape []) is not 0 where a gradient is not finite. `index_for` gives kernels a place for the index of the
    first such tensor of a list, which ``name_of`` turns into a name. ``scaler`` is the loss scaler whose iteration this is part of,
    None for an optimizer that the block does not name; ``moves_scale`` tells whether its scale has moved by the flag.
    """

    loss: torch.Tensor | None = None  # of the last block

    def __init__(self, flag: torch.Tensor, scaler: Any = None, name_of: Callable[[Any], str] = repr) -> None:
        self.flag, self.scaler, self._name_of = flag, scaler, name_of
        self.moves_scale = False
        self._lists: list[tuple[Sequence[torch.Tensor], torch.Tensor]] = []

    def index_for(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Where to write the index (int64, shape []) of the first of these whose gradient is not finite."""
        if not tensors:
            return None
        index = constant(kernels.NO_BAD, torch.int64, self.flag.device).clone()
        self._lists.append((tensors, index))
        return index

    @functools.cached_property
    def overflowed(self) -> bool:
        """Whether a gradient was not finite. Waits for the device."""
        return is_set(self.flag)

    def first_nonfinite(self) -> str | None:
        """The name of the first parameter whose gradient was not finite here; None where no kernel has written one."""
        for tensors, index in self._lists:
            if (first := int(index)) < len(tensors):
                return self._name_of(tensors[first])
        return None


@functools.cache
def constant(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of shape [], to be cloned: that takes a third of the time of making one."""
    return torch.full((), value, dtype=dtype, device=device)


def is_capturing(tensor: torch.Tensor) -> bool:
    """Whether a CUDA graph is captured that may be about this tensor."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def refuse_to_read(tensor: torch.Tensor) -> None:
    """Raise where the host would have to wait for a graph that is being captured."""
    if is_capturing(tensor):
        raise ConfigurationError(
            "While a CUDA graph is captured the host cannot learn whether gradients are finite, and something asks: the step of an "
            "ordinary optimizer, step_was_skipped() or state_dict(). Steps of ampkit.optimizers, and of torch's with fused=True, "
            "are decided on the device; with loss_scale=1.0 and check_gradients=False nothing is."
        )


def is_set(flag: torch.Tensor) -> bool:
    """Whether a flag is not 0. Waits for its device."""
    refuse_to_read(flag)
    return flag.item() != 0.0


def is_known_clean(flag: torch.Tensor) -> bool:
    """Whether the host can tell without waiting that a flag is 0: on the CPU."""
    return flag.is_cpu and flag.item() == 0.0


def places_for(
    found: FoundInf | None, tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The ``found_inf`` and ``first_bad`` of a kernel over these tensors; None where nothing is checked."""
    return (None, None) if found is None else (found.flag, found.index_for(tensors))


class Findings:
    """Whether the gradients of one optimizer were finite, from the blocks that made them to the steps that use them.

    Each block adds its `FoundInf`. A step takes them as one flag, `flag`, and decides by it on its device, or, where the optimizer
    has to be told on the host, by `forbid_step`.
    """

    def __init__(self, gradients: Any, owner: Any) -> None:
        self._gradients, self._owner = gradients, owner
        self._new: list[FoundInf] = []  # since the last step
        self._used: list[FoundInf] = []  # by steps, since there are gradients
        self._flag: torch.Tensor | None = None  # of the last step, while no block has made other gradients
        # A number that is finite where all gradients were, and these as they were then.
        self._checked: tuple[torch.Tensor, list[Seen]] | None = None
        self._skipped: bool | torch.Tensor = False  # the last step; a tensor is the flag by which its device decided
        self.scaler: Any = None  # of the last block
        self.came_through_no_block = False  # a backward pass outside of every block has written to the gradients

    def add(self, found: FoundInf | None) -> None:
        """A block has made gradients, and this is its flag; None where it does not check them."""
        self._flag = self._checked = None
        if found is not None and found not in self._new:
            self._new.append(found)

    @property
    def has_new(self) -> bool:
        """Whether a block has made gradients since the last step, and checked them."""
        return bool(self._new)

    def mark_checked(self, number: torch.Tensor) -> None:
        """Have the next step judge the gradients of now by a number that is finite where they are, without a look of its own."""
        self._checked = number, [seen(slot) for slot in self._gradients.slots]

    def flag(self, checks: bool = False) -> torch.Tensor | None:
        """Not 0 where this step is to be skipped (float32, shape []); None where nothing was checked. Nothing waits for it.

        With ``checks``, gradients that no block has checked are checked now.
        """
        found = self._end_blocks()
        if found:
            flag = _highest([one.flag for one in found])
            apart = [one.flag for one in found if not one.moves_scale]
            if self.came_through_no_block or self._is_averaged_by_hand():  # what came after the block had checked
                again = self._check_again().flag
                apart.append(again - flag)
                flag = _highest([flag, again])
            if apart:
                self._owner.scaling.scalers[0].count_apart(_highest(apart))
            self._used += found
            self._flag = flag
        elif checks or self._flag is not None:
            # Where there is a flag, the step before has used it. Since then a script may have put other gradients there.
            again, scaler = self._check_again(), self.scaler or self._owner.scaling.scalers[0]
            if checks and scaler.is_one:
                scaler.update(again)
                scaler.report()
            elif self._flag is None:
                scaler.count_apart(again.flag)
            self._flag = again.flag
        self._checked = None
        self._skipped = False if self._flag is None else self._flag
        return self._flag

    def forbid_step(self, checks: bool = False) -> bool:
        """Whether this step is to be skipped, read from the device; a skip is reported."""
        scalers = {one.scaler for one in (self, *self._new) if one.scaler is not None}
        flag = self.flag(checks)
        self._skipped = flag is not None and is_set(flag)
        if self._skipped:
            for scaler in scalers.union(self._owner.scaling.scalers[:1]):
                scaler.report(wait=True, unnamed=self._first_nonfinite)
        return self._skipped

    @property
    def skipped(self) -> bool:
        """Whether the last step was skipped. Waits for the device where that was decided there."""
        if isinstance(self._skipped, torch.Tensor):
            self.end_step(is_set(self._skipped), clears=self._flag is not None)
        return self._skipped

    def end_step(self, skipped: bool, clears: bool = True) -> None:
        """The last step was taken, or ``skipped``: then its gradients become 0, since the next step must not use them."""
        self._skipped = skipped
        if skipped and clears:
            self.forget()
            self._gradients.clipping.forget()
            self._gradients.zero_where(constant(1.0, torch.float32, self._gradients.device))

    def _end_blocks(self) -> list[FoundInf]:
        """The flags since the last step. Checks that were delayed end their iteration now at the latest."""
        found, self._new = self._new, []
        if len(self._owner.optimizers) > 1:  # blocks that named another may have made gradients of the same parameters
            shared = dict.fromkeys(slot.found_inf for slot in self._gradients.slots if slot.owners > 1)
            known = {None, *found, *self._used}
            self._used = [one for one in self._used if one in shared]
            found += [one for one in shared if one not in known]
        else:
            self._used = []
        for one in found:
            if one.scaler is not None and one.scaler.delayed_check is one:
                one.scaler.update(one)
        return found

    def _is_averaged_by_hand(self) -> bool:
        """Whether a script may average gradients over processes between block and step. torch counts no write of a collective."""
        return self._owner.process_group is not None or (
            self._owner.scaling.is_one_of_several_without_ddp and not self._gradients.process_groups
        )

    def _check_again(self) -> FoundInf:
        """Whether the gradients of now are finite, on all processes that step together."""
        if self._checked is not None and all(map(is_still, self._checked[1])):
            return FoundInf(self._checked[0].isfinite().logical_not().float().reshape(()))
        found = FoundInf(constant(0.0, torch.float32, self._gradients.device).clone(), name_of=self._owner.name_of)
        self._gradients.check(found)
        highest(found.flag, self._gradients.process_groups)
        return found

    def _first_nonfinite(self) -> str | None:
        """The name of the first parameter whose gradient is not finite now."""
        for slot in self._gradients.slots:
            if slot.gradient is not None and not local(values_of(slot.gradient)).isfinite().all():
                return self._owner.name_of(slot.param)
        return None

    # Flags go with the gradients

    def forget(self) -> None:
        """The gradients are gone, and with them the flags of blocks that did not name this optimizer: they move no scale."""
        self._flag = self._checked = None
        self.came_through_no_block = False
        self._used = []
        self._new = [found for found in self._new if found.scaler is not None]

    def drop_cleared(self) -> bool:
        """Forget the flags of gradients that were cleared. Returns whether there are no gradients."""
        is_empty = self._gradients.drop_cleared()
        if is_empty:
            self.forget()
        return is_empty

    def drop_skipped(self) -> None:
        """Before a block adds to gradients that were not cleared: zeros in their place, where the last step was skipped."""
        if self._flag is not None and not is_known_clean(self._flag):
            self._gradients.zero_where(self._flag)


def _highest(flags: list[torch.Tensor]) -> torch.Tensor:
    """One flag for all of these, where the first is."""
    return functools.reduce(lambda highest_yet, flag: torch.maximum(highest_yet, on(flag, highest_yet.device)), flags)
