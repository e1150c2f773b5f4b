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
from .recorder import Iterations, recorded

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
    records: list[Record] = []
    code, error = observe(arguments, _some_iterations(arguments.skip, arguments.iterations, records))
    record = records[0] if records else Record()
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


@contextmanager
def _some_iterations(skip: int, iterations: int, records: list[Record]) -> Iterator[None]:
    """Skip ``skip`` iterations of the script inside, record ``iterations`` into the list, and stop the script."""
    with ExitStack() as watching:

        def after_skipped(iteration: int) -> None:
            if iteration == skip:
                watching.close()
                records.append(watching.enter_context(recorded(after_recorded)))

        def after_recorded(iteration: int) -> None:
            if iteration == iterations:
                watching.close()
                raise Enough

        if skip:
            watching.enter_context(listening(Iterations(after_skipped), steps))
        else:
            after_skipped(0)
        yield
