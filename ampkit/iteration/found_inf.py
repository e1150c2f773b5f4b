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
from ..casting.torch_integration import aliases_taken
from ..errors import ConfigurationError
from ..optimizers.scales import on
from ..sharding import highest
from . import clipping
from .reach import are_still, seen


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
    """Whether the gradients of one optimizer are finite, from the blocks that made them to the steps that use them.

    A flag is about gradients, and goes with them: it is dropped where they are cleared, or others put in their place. A step looks
    at the gradients that it would step with, and goes by the flags of the blocks that made them too: what a script has repaired
    since, or another optimizer of the block has met, skips it all the same.
    """

    def __init__(self, gradients: Any, owner: Any) -> None:
        self._gradients, self._owner = gradients, owner
        self._flag: torch.Tensor | None = None  # of all blocks that made the gradients that are there
        self._new: list[FoundInf] = []  # these blocks, until a step has counted them
        self._shared: torch.Tensor | None = None  # of another optimizer's block, which made some of these gradients
        self._made_some = False  # whether these blocks have made gradients
        self._judged: tuple[Any, int | None] | None = None  # all of them, when the last block had judged them
        self._checked: tuple[torch.Tensor, list[clipping.Seen]] | None = None  # a number that is finite where these are
        #: Of the optimizers that a block at loss scale 1 has named together: the flags of those that have stepped since.
        self._beside: dict[Findings, torch.Tensor | None] = {}
        self._skipped: bool | torch.Tensor = False  # the last step; a tensor is the flag by which its device decided
        self.scaler: Any = None  # of the last block
        self._scalers: list[Any] = []  # of the blocks that the last step has gone by
        self.came_through_no_block = False  # a backward pass outside of every block has written to the gradients

    def add(self, found: FoundInf | None) -> None:
        """A block has made gradients, and this is its flag; None where it does not check them."""
        self._checked = self._shared = None
        if found is not None and found not in self._new:
            if self.is_used:
                self._flag = None
            self._new.append(found)
            self._flag = found.flag if self._flag is None else _highest([self._flag, found.flag])
            self._gradients.note_judged()
            self._made_some = self._gradients.are_judged
            self._judged = seen(self._gradients.params), aliases_taken()

    def begin(self, scaler: Any, named: Sequence[Any]) -> None:
        """A block has named the optimizer. Where only steps look at gradients, those ``named`` together skip together."""
        self.scaler = scaler
        self._beside = {} if len(named) < 2 else {one.findings: None for one in named if one.findings is not self}

    @property
    def is_used(self) -> bool:
        """Whether a step has gone by the flag of the gradients that are there."""
        return self._flag is not None and not self._new

    def share(self, found: FoundInf) -> None:
        """Another optimizer's block has made gradients that this one updates too, until a block makes them again."""
        self._shared = found.flag

    @property
    def has_new(self) -> bool:
        """Whether a block has made gradients since the last step, and checked them."""
        return bool(self._new)

    def mark_checked(self, number: torch.Tensor) -> None:
        """Have the next step judge the gradients of now by a number that is finite where they are, without a look of its own."""
        self._checked = number, clipping.seen(self._gradients.slots)

    def flag(self, checks: bool = False) -> torch.Tensor | None:
        """Not 0 where this step is to be skipped (float32, shape []); None where nothing was checked. Nothing waits for it.

        At loss scale 1 gradients are looked at with ``checks`` alone.
        """
        self._drop_of_others()
        new, self._new = self._new, []
        self._scalers = [one.scaler for one in (self, *new) if one.scaler is not None]
        for one in new:
            if one.scaler is not None and one.scaler.delayed_check is one:  # its iteration ends now at the latest
                one.scaler.update(one)
        apart = [one.flag for one in new if not one.moves_scale]
        scaler, before = self.scaler or self._owner.scaling.scalers[0], self._flag
        is_one = scaler.is_one
        if (checks or not is_one) and not (before is not None and (self._are_still() or self._are_agreed())):
            again = self._look()
            if is_one:
                self._heed_others(again)
                scaler.update(again)
                scaler.report()
                self._flag = again.flag
            elif before is None or not is_known_clean(again.flag):
                apart += [again.flag if before is None else again.flag - before] if new or before is None else []
                self._flag = again.flag if before is None else _highest([before, again.flag])
        if self._shared is not None:
            self._flag = self._shared if self._flag is None else _highest([self._flag, self._shared])
        if apart and not is_known_clean(flag := _highest(apart)):
            self._owner.scaling.scalers[0].count_apart(flag)
        self._checked = None
        self._skipped = False if self._flag is None else self._flag
        return self._flag

    def forbid_step(self, checks: bool = False) -> bool:
        """Whether this step is to be skipped, read from the device; a skip is reported."""
        flag = self.flag(checks)
        self._skipped = flag is not None and is_set(flag)
        if self._skipped:
            self.report()
        return self._skipped

    def report(self) -> None:
        """Log a skip that the host knows of."""
        for scaler in dict.fromkeys([*self._scalers, *self._owner.scaling.scalers[:1]]):
            scaler.report(wait=True, unnamed=self._first_nonfinite)

    @property
    def skipped(self) -> bool:
        """Whether the last step was skipped. Waits for the device where that was decided there."""
        if isinstance(self._skipped, torch.Tensor):
            self._skipped = is_set(self._skipped)
        return self._skipped

    @property
    def flag_of_step(self) -> bool | torch.Tensor:
        """The same without waiting: above 0 where its device has skipped the last step."""
        return self._skipped

    def end_step(self, skipped: bool) -> None:
        """The last step was taken, or ``skipped``."""
        self._skipped = skipped

    def forget(self) -> None:
        """The gradients are gone, and what was found in them."""
        self._flag = self._judged = self._checked = self._shared = None
        self._made_some = False
        self._new = []
        self.came_through_no_block = False

    def drop_cleared(self) -> None:
        """There are no gradients: what was found in them goes. A flag stays of a block that has made none of them."""
        if self._made_some or self._flag is None:
            self.forget()

    def zero_skipped(self, forgets: bool = True) -> None:
        """Before a block adds to gradients that a step has refused, or a session ends: zeros in their place."""
        self._drop_of_others()
        if self._flag is not None and not is_known_clean(self._flag):
            self._gradients.zero_where(self._flag)
        if forgets:
            self.forget()

    def _drop_of_others(self) -> None:
        """Forget flags of gradients in whose places a script has put others."""
        if self._made_some and not self._gradients.are_judged:
            self.forget()

    def _heed_others(self, own: FoundInf) -> None:
        """Have the flag be set where one of another optimizer of the block is."""
        beside, self._beside = self._beside, {}
        told = own.flag.clone() if beside else own.flag
        for other, flag in beside.items():
            flag = other._look().flag if flag is None else flag
            own.flag.copy_(torch.maximum(own.flag, on(flag, own.flag.device)))
            if self in other._beside:
                other._beside[self] = told

    def _are_still(self) -> bool:
        """Whether these are the gradients that a block has judged, with no write since: torch counts them, but through an alias."""
        if self._judged is None or self._is_averaged_by_hand():
            return False
        judged, aliases = self._judged
        return aliases is not None and aliases == aliases_taken() and are_still(judged, self._gradients.params)

    def _are_agreed(self) -> bool:
        """Whether the processes that step together have agreed at the end of the block, and nothing has come since."""
        return bool(self._gradients.process_groups) and not self._is_averaged_by_hand()

    def _is_averaged_by_hand(self) -> bool:
        """Whether a script may average gradients over processes between block and step. torch counts no write of a collective."""
        return self._owner.process_group is not None or (
            self._owner.scaling.is_one_of_several_without_ddp and not self._gradients.process_groups
        )

    def _look(self) -> FoundInf:
        """Whether the gradients of now are finite, on all processes that step together."""
        if self._checked is not None and all(map(clipping.is_still, self._checked[1])):
            return FoundInf(self._checked[0].isfinite().logical_not().float().reshape(()))
        found = FoundInf(constant(0.0, torch.float32, self._gradients.device).clone(), name_of=self._owner.name_of)
        self._gradients.check(found)
        if self._gradients.process_groups:
            highest(found.flag, self._gradients.process_groups)
        return found

    def _first_nonfinite(self) -> str | None:
        """The name of the first parameter whose gradient is not finite now."""
        param = self._gradients.first_nonfinite()
        return None if param is None else self._owner.name_of(param)


def _highest(flags: Sequence[torch.Tensor]) -> torch.Tensor:
    """One flag for all of these, where the first is."""
    highest_yet = flags[0]
    for flag in flags[1:]:
        highest_yet = torch.maximum(highest_yet, flag.to(highest_yet.device, non_blocking=True))
    return highest_yet
