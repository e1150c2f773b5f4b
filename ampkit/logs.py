"""The logger ``ampkit``, and its handler while a session with ``verbosity >= 1`` is alive.

It writes lines to standard output on rank 0, unless the application gave the logger handlers of its own, or writes them to the
terminal by a handler of the root logger (``logging.basicConfig``).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator

import torch

from .patching import PatchSet, SharedPatches

logger = logging.getLogger("ampkit")


def printable(name: str) -> str:
    """The name of a module or parameter for output in one line: line breaks and controls of a terminal are escaped."""
    return name if name.isprintable() else repr(name)[1:-1]


def is_rank_zero() -> bool:
    """Whether this process logs for all: rank 0 of the process group, or of the launcher, or the only one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


class _RankZeroStdout(logging.Handler):
    """A handler that writes plain messages to the current ``sys.stdout``, so that redirection works; on rank 0 only."""

    def emit(self, record: logging.LogRecord) -> None:
        # Checked for each record: scripts may call ``logging.basicConfig`` before or after ``initialize``.
        is_shown = logger.propagate and any(is_of_terminal(handler, record) for handler in handlers_above())
        if is_rank_zero() and not is_shown:
            sys.stdout.write(self.format(record) + "\n")
            sys.stdout.flush()


def handlers_above() -> Iterator[logging.Handler]:
    """Yield the handlers of the loggers above ampkit's."""
    above = logger.parent
    while above is not None:
        yield from above.handlers
        above = above.parent if above.propagate else None


def is_of_terminal(handler: logging.Handler, record: logging.LogRecord) -> bool:
    """Whether this handler writes the record to the terminal."""
    console = getattr(handler, "console", None)  # rich's handler has no stream of its own
    stream = getattr(handler, "stream", getattr(console, "file", None))
    terminal = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return record.levelno >= handler.level and stream is not None and any(stream is x for x in terminal)


def _attach(undo: PatchSet) -> None:
    if not logger.handlers:
        handler = _RankZeroStdout()
        logger.addHandler(handler)
        undo.callback(logger.removeHandler, handler)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
            undo.callback(logger.setLevel, logging.NOTSET)


#: ampkit's handler on the logger: attached by the first session that wants it, removed after the last.
stdout_lines = SharedPatches(_attach)
