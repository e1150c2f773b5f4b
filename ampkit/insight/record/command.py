"""``ampkit record``: record some iterations of a script that runs unedited.

The script ends after these iterations. Under a launcher only rank 0 prints, its own record.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ...events import listening, steps
from ...logs import is_rank_zero
from ...scripts import running
from ..observed import observe
from ..watching import Enough
from .record import Record
from .recorder import Iterations, recording

EXAMPLE = "ampkit record --device cpu --iterations 2 tests/apex/scripts/classify.py --opt-level O1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--iterations``, ``--skip``, ``--json`` and ``--html``, and the options of ``ampkit run``."""
    parser.add_argument("--iterations", type=int, default=3, metavar="N", help="record so many iterations (3)")
    parser.add_argument("--skip", type=int, default=1, metavar="N", help="after so many that are not recorded (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with the source")
    running.add_arguments(parser, observes=True)


def from_command_line(arguments: argparse.Namespace) -> int:
    """Run the script, and print the record. The exit code is the script's own if it failed, 1 if nothing was recorded, else 0."""
    # Resolved before the script changes its folder.
    paths = [path and path.resolve() for path in (arguments.json, arguments.html)]
    window = _Window(arguments.skip, arguments.iterations)
    code, error = observe(arguments, window.watching())
    record = window.record
    if not record.calls:
        if code == 0:
            ended = f"the script ended before the {arguments.skip + 1}. step of an optimizer"
            print(f"ampkit record: {ended}.", file=sys.stderr)
            code = 1
    elif is_rank_zero():
        print(record, flush=True)
        for path, write in zip(paths, (record.to_json, record.to_html)):
            if path is not None:
                write(path)
                print(f"ampkit record: wrote {path}", file=sys.stderr)
    if error is not None:
        raise error
    return code


class _Window(Iterations):
    """A listener that skips some iterations of a script, records the following into ``record``, and stops the script."""

    def __init__(self, skip: int, iterations: int) -> None:
        super().__init__()
        self.record = Record()
        self._skip, self._last, self._watching = skip, skip + iterations, ExitStack()

    def iteration_ends(self) -> None:
        if self.iterations == self._skip:
            self.record = self._watching.enter_context(recording())
            self._first = lambda: None  # from now on the optimizer that steps first in the recording counts
        elif self.iterations == self._last:
            self._watching.close()
            raise Enough

    @contextmanager
    def watching(self) -> Iterator[None]:
        with self._watching:
            self._watching.enter_context(listening(self, steps))
            if not self._skip:
                self.iteration_ends()
            yield
