"""``ampkit record``: a script that runs unedited, of which some iterations are recorded.

It ends where it has made them. Under a launcher rank 0 prints its own.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

from ...events import listening, steps
from ...logs import is_rank_zero
from ...scripts import running
from ..watching import Enough
from .record import Record
from .recorder import Iterations, recorded

EXAMPLE = "ampkit record --device cpu --iterations 2 tests/apex/scripts/classify.py --opt-level O1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``--iterations``, ``--skip``, ``--json`` and ``--html``, and what ``ampkit run`` takes."""
    parser.add_argument("--iterations", type=int, default=3, metavar="N", help="record so many iterations (3)")
    parser.add_argument("--skip", type=int, default=1, metavar="N", help="after so many that are not recorded (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with the source")
    running.add_arguments(parser, observes=True)


def from_command_line(arguments: argparse.Namespace) -> int:
    """Run the script, and print the record. The exit code is 0 where something was recorded."""
    if arguments.iterations < 1 or arguments.skip < 0:
        print("ampkit record: expected --iterations of at least 1 and --skip of at least 0.", file=sys.stderr)
        return 2
    # Before the script changes its folder.
    paths = [path and path.resolve() for path in (arguments.json, arguments.html)]
    script, code = _Script(arguments.skip, arguments.iterations), 0
    try:
        with suppress(Enough), script:
            code = running.from_command_line(arguments)
    except SystemExit as exited:
        code = exited.code if isinstance(exited.code, int) else int(exited.code is not None)
    record = script.record
    if record is None or not record.calls:
        if code == 0:
            ended = f"the script ended before the {arguments.skip + 1}. step of an optimizer"
            print(f"ampkit record: {ended}.", file=sys.stderr)
        return code or 1
    if is_rank_zero():
        print(record)
        for path, write in zip(paths, (record.to_json, record.to_html)):
            if path is not None:
                write(path)
                print(f"ampkit record: wrote {path}", file=sys.stderr)
    return code


class _Script(ExitStack):
    """Around a script: waits for ``skip`` iterations, records ``iterations``, and stops it. Then ``record`` is there."""

    record: Record | None = None

    def __init__(self, skip: int, iterations: int) -> None:
        super().__init__()
        self._skip, self._iterations = skip, iterations

    def __enter__(self) -> _Script:
        if self._skip:
            self.enter_context(listening(Iterations(self._after_skipped), steps))
        else:
            self._begin()
        return self

    def _after_skipped(self, iteration: int) -> None:
        if iteration == self._skip:
            self.close()
            self._begin()

    def _begin(self) -> None:
        self.record = self.enter_context(recorded(self._after_recorded))

    def _after_recorded(self, iteration: int) -> None:
        if iteration == self._iterations:
            self.close()
            raise Enough
