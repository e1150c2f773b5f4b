"""The core logs, Apex printed: while the drop-in is in use, lines of the core go to standard output as Apex's did.

On every rank, as Apex printed overflows; nothing below ``_amp_state.verbosity`` 1, except that warnings then go to standard
error. The core's own banner is kept silent, since the drop-in prints Apex's.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ...logs import logger
from ._amp_state import _amp_state


class _Printer(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.silent_below = logging.NOTSET
        self.level_before: int | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < self.silent_below:
            return
        if _amp_state.verbosity > 0:
            print(self.format(record))
        elif record.levelno >= logging.WARNING:
            print(self.format(record), file=sys.stderr)


_printer = _Printer()


def attach() -> None:
    """Print the core's lines from now on."""
    if _printer not in logger.handlers:
        _printer.level_before = logger.level
        logger.addHandler(_printer)
        if logger.level == logging.NOTSET or logger.level > logging.INFO:
            logger.setLevel(logging.INFO)


def detach() -> None:
    """Leave them to the handlers of the logger."""
    if _printer in logger.handlers:
        logger.removeHandler(_printer)
        logger.setLevel(_printer.level_before)


@contextmanager
def only_warnings() -> Iterator[None]:
    """Inside, nothing below a warning is printed."""
    _printer.silent_below = logging.WARNING
    try:
        yield
    finally:
        _printer.silent_below = logging.NOTSET
