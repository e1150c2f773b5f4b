"""A handler that prints the core's log lines while the drop-in is in use, since Apex printed its lines to standard output.

It prints on every rank, as Apex printed overflows. Below ``_amp_state.verbosity`` 1 it prints only warnings, to standard
error. The core's own banner is not printed, since the drop-in prints Apex's.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ...logs import handlers_above, is_of_terminal, logger
from ._amp_state import _amp_state


class _Printer(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.silent_below = logging.NOTSET
        self.before: tuple[int, bool] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        # Each line once: handlers above that write to the terminal too are left out.
        for handler in handlers_above() if self.before[1] else ():
            if record.levelno >= handler.level and not is_of_terminal(handler, record):
                handler.handle(record)
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
        _printer.before = logger.level, logger.propagate
        logger.addHandler(_printer)
        logger.propagate = False
        if logger.level == logging.NOTSET or logger.level > logging.INFO:
            logger.setLevel(logging.INFO)


def detach() -> None:
    """Leave the core's lines to the handlers of the logger again."""
    if _printer in logger.handlers:
        logger.removeHandler(_printer)
        level, logger.propagate = _printer.before
        logger.setLevel(level)


@contextmanager
def only_warnings() -> Iterator[None]:
    """Print nothing below a warning inside."""
    _printer.silent_below = logging.WARNING
    try:
        yield
    finally:
        _printer.silent_below = logging.NOTSET
