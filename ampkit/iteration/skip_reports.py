"""What is said of skipped steps, and when: a step that was skipped on the device is logged when the host has learned of it."""

from __future__ import annotations

import weakref
from collections import deque

from ..errors import LossScaleError
from ..logs import logger
from .findings import Findings
from .found_inf import FoundInf

SKIPS_BEFORE_DIAGNOSIS = 25


class SkipReports:
    """The skipped steps of one session: those that are not known yet, and the error that one of them has led to."""

    def __init__(self, on_floor: str) -> None:
        self._on_floor = on_floor
        # What was found before steps that were skipped or taken on the device.
        self._unreported: deque[tuple[weakref.ref[Findings], list[FoundInf]]] = deque()
        # Found where raising would have been out of place: the next block raises it.
        self._postponed_error: LossScaleError | None = None

    def report(self, findings: Findings | None, found: FoundInf) -> None:
        """Log a skipped step once. After many in a row name the parameter; raise where no scale will ever be small enough."""
        if found.reported or not found.overflowed:
            return
        found.reported = True
        if found.at_step:
            logger.info(
                "Gradients were finite when the scale_loss block ended and are not at step(): it is skipped, the scale stays. "
                "Where they are averaged over processes by hand, pass process_group= to initialize()."
            )
        elif found.scaler is None:
            logger.info(
                "Gradient overflow in a scale_loss block that did not name this optimizer: its step is skipped, the scale stays."
            )
        elif not found.moves_scale:
            logger.info(
                "Gradient overflow under no_sync(): this step is skipped; the loss scale moves at the next sync."
            )
        else:
            self._report_backoff(findings, found)

    def _report_backoff(self, findings: Findings | None, found: FoundInf) -> None:
        """The same for a step that has moved the loss scale, as most do."""
        scaler, skips = found.scaler, found.skips_in_a_row
        logger.info(scaler.overflow_line(found))
        if skips and skips % SKIPS_BEFORE_DIAGNOSIS == 0:
            logger.warning(
                "Loss scaler %d: %d steps in a row were skipped; the first parameter whose gradient is not finite is %s.",
                scaler.loss_id,
                skips,
                _first_nonfinite(findings, found),
            )
        else:
            logger.debug("The first parameter whose gradient is not finite is %s.", _first_nonfinite(findings, found))
        scaler.give_up_at_floor(self._on_floor, found)

    def report_late(self, findings: Findings, found: list[FoundInf]) -> None:
        """A step was taken or skipped on the device: log a skip when the host has learned of it."""
        if not any([one.is_captured for one in found]):  # replays of a CUDA graph run without us
            self._unreported.append((weakref.ref(findings), found))

    def report_all(self) -> None:
        """Wait for every step, and log the skipped ones. Nothing is raised: the next block will."""
        error = self._postponed_error
        while self._unreported:
            try:
                self._report_oldest()
            except LossScaleError as newer:
                error = newer
        self._postponed_error = error

    def report_known(self) -> None:
        """Log the skipped steps that the host has learned of by now, without waiting."""
        while self._unreported and all([one.is_known for one in self._unreported[0][1]]):
            self._report_oldest()

    def raise_postponed(self) -> None:
        """Raise the error that `report_all` has kept back, if there is one."""
        error, self._postponed_error = self._postponed_error, None
        if error is not None:
            raise error

    def _report_oldest(self) -> None:
        findings, found = self._unreported.popleft()
        overflows = [one for one in found if one.overflowed]
        if overflows:
            self.report(findings(), overflows[-1])


def _first_nonfinite(findings: Findings | None, found: FoundInf) -> str:
    return "not found (its optimizer is gone)" if findings is None else findings.name_of_first(found)
