"""What was found about the gradients of one optimizer, from the blocks that made them to the steps that use them.

Each block hands in its `FoundInf`. The step takes all that came since the last one: fused optimizers as one flag on the device,
others as an answer on the host. What was found goes when the gradients do. Every skipped step is reported from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from ..optimizers.scales import on
from ..sharding import highest, local
from .found_inf import FoundInf
from .gradients import Gradients
from .sparse_gradients import values_of


class Findings:
    """Since the last step, and of steps whose gradients are still there.

    ``verdict`` on the last step is whether it was skipped, or the flag by which its device decided.
    """

    def __init__(self, gradients: Gradients, owner: Any) -> None:
        self._gradients, self._owner = gradients, owner
        self._new: list[FoundInf] = []  # since the last step
        self._used: list[FoundInf] = []  # by steps on the device, since there are gradients
        self._flag: torch.Tensor | None = None  # of the last step, while no block has made others
        self.verdict: bool | torch.Tensor = False

    def add(self, found: FoundInf | None) -> None:
        """A block has made gradients, and found this; None where it does not look."""
        self._flag = None
        if found is not None and found not in self._new:
            self._new.append(found)

    @property
    def skipped(self) -> bool:
        """Whether the last step was skipped. Waits for the device where that was decided there."""
        if isinstance(self.verdict, torch.Tensor):
            self.verdict = bool(self.verdict.item())
            if self.verdict and self._flag is not None:
                self.drop_overflowed([found for found in self._used if found.overflowed])
        return self.verdict

    def overflows(self) -> list[FoundInf]:
        """What forbids this step, read from the device and reported: it is skipped where there is any."""
        overflows = [found for found in self._take() if found.overflowed]
        self.verdict = bool(overflows)
        if overflows:
            self._owner.scaling.reports.report(self, overflows[-1])
        return overflows

    def flag(self, unless_clean: bool = False) -> torch.Tensor | None:
        """The flag for all gradients of this step, on the device; the host hears of it later.

        With ``unless_clean`` it is None where the host knows already that the step is to be taken.
        """
        found = self._take()
        if found:
            self._flag = found[0].flag
            for one in found[1:]:
                self._flag = torch.maximum(self._flag, on(one.flag, self._flag.device))
            self._owner.scaling.reports.report_late(self, found)
            self._used += found
        elif self._flag is not None:
            # The step before has used it. Since then a script may have put other gradients there.
            self._flag = self._look_again()
        self.verdict = False if self._flag is None else self._flag
        if unless_clean and found and all([one.is_known and not one.overflowed for one in found]):
            return None
        return self._flag

    def _take(self) -> list[FoundInf]:
        """What was found since the last step. Delayed checks end their iteration now at the latest."""
        found, self._new = self._new, []
        if len(self._owner.optimizers) > 1:  # blocks that named another may have made gradients of the same parameters
            shared = dict.fromkeys(slot.found_inf for slot in self._gradients.slots if slot.owners > 1)
            known = {None, *found, *self._used}
            found += [one for one in shared if one not in known]
        for one in found:
            if one.scaler is not None and one.scaler.delayed_check is one:
                one.scaler.update(one)
        found = [one for one in found if one.is_sent]  # not what a script has judged itself, after a delay
        if found and self._is_averaged_by_hand():
            # What an average brings in came after the block had judged.
            again = FoundInf.of(self._look_again())
            again.at_step = True
            again.send()
            found.insert(0, again)
        return found

    def _is_averaged_by_hand(self) -> bool:
        """Whether a script may average gradients over processes between block and step. torch counts no write of a collective."""
        return self._owner.process_group is not None or (
            self._owner.scaling.is_one_of_several_without_ddp and not self._gradients.process_groups
        )

    def _look_again(self) -> torch.Tensor:
        """A flag that says whether the gradients of now are finite, on all processes that have to agree."""
        norm = self._gradients.total_norm()
        if norm is None:  # the others may have some
            norm = torch.zeros(1, device=self._gradients.device)
        flag = norm.isfinite().logical_not().float().reshape(())
        highest(flag, self._gradients.process_groups)
        return flag

    # What was found goes with the gradients

    def forget(self) -> None:
        """The gradients are gone, and what blocks found that did not name this optimizer with them: it moves no scale."""
        self._flag, self._used = None, []
        unnamed = [found for found in self._new if found.scaler is None]
        self._new = [found for found in self._new if found.scaler is not None]
        for found in unnamed:
            found.look()  # what nothing was written to is used again

    def drop_cleared(self) -> bool:
        """Forget what was found about gradients that were cleared. Returns whether there are none."""
        is_empty = self._gradients.drop_cleared()
        if is_empty:
            self.forget()
        return is_empty

    def drop_overflowed(self, found: Sequence[FoundInf]) -> None:
        """After a skipped step: its gradients are not finite and of no use to anyone, least of all to the next step."""
        self.forget()
        self._gradients.drop_overflowed(found)

    def drop_known_overflow(self) -> None:
        """Drop gradients that nobody has cleared since a step that turned out, without waiting, to have been skipped."""
        known = [found for found in self._used if found.is_known and found.overflowed]
        if known:
            self.drop_overflowed(known)

    def name_of_first(self, found: FoundInf) -> str:
        """The name of the first parameter, in the optimizer's order, whose gradient was not finite."""
        params = [slot.param for slot in self._gradients.slots]
        among = set(found.first_nonfinite)
        noted = (param for param in params if param in among)
        read = (
            param for param in params if param.grad is not None and not local(values_of(param.grad)).isfinite().all()
        )
        return self._owner.name_of(next(chain(noted, read), None))
