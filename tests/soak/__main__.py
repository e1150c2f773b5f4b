"""The driver: see the package's docstring."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import os
import platform
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp

from . import death, hostile, interrupts, lifetimes, nonfinite, processes, threads
from .promise import Promise

GROUPS = {
    module.__name__.rpartition(".")[2]: [value for value in vars(module).values() if isinstance(value, Promise)]
    for module in (nonfinite, interrupts, death, processes, threads, lifetimes, hostile)
}
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Row:
    """A line of the table: a promise, and what has become of it."""

    group: str
    promise: Promise
    number: int = 0  # of the next attempt
    attacks: int = 0
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)
    measured: dict[str, list[float]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "group": self.group,
            "name": self.promise.name,
            "promise": self.promise.promise,
            "attack": self.promise.attack,
            "attempts": self.number,
            "attacks": self.attacks,
            "seconds": round(self.seconds, 1),
            "violations": [f"{lines[0]}: {lines[-1]}" for lines in map(str.splitlines, self.violations)],
            "measured": {name: [round(value, 4) for value in values] for name, values in self.measured.items()},
        }


class Attempt:
    """An attempt in its own process. The process leads a session, so everything it starts ends with it."""

    def __init__(self, row: Row, seed: int, number: int, folder: Path) -> None:
        self.row, self.seed, self.number = row, seed, number
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        self.began = time.monotonic()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._run()
        self.ended = os.pidfd_open(self.pid)  # becomes readable

    @property
    def command(self) -> str:
        options = f"--only {self.row.promise.name} --seed {self.seed} --attempt {self.number}"
        return f"PYTHONPATH=tests python -m soak {options}"

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def is_late(self) -> bool:
        return self.seconds > self.row.promise.limit

    def _run(self) -> None:
        """Make the attempt in the child, and write the result."""
        os.setsid()
        log = os.open(self.folder / "output", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.enable()
        tempfile.tempdir = str(self.folder)
        try:
            result = case(self.row.promise, self.seed, self.number)
        except BaseException:
            result = {"violation": traceback.format_exc()}
        (self.folder / "result").write_text(json.dumps(result))
        sys.stdout.flush()
        os._exit(0)

    def end(self) -> None:
        """Enter the result into the row, once the attempt has ended or its time is over."""
        row, was_late, seconds = self.row, self.is_late, self.seconds
        kill_all_of(self.pid)
        os.close(self.ended)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        try:
            result = json.loads((self.folder / "result").read_text())
        except (OSError, ValueError):
            why = f"hung: not done after {row.promise.limit:g} seconds" if was_late else f"died with status {status}"
            result = {"violation": f"the attempt {why}"}
        row.seconds += seconds
        row.attacks += result.get("attacks", 1)
        for name, value in result.get("measured", {}).items():
            row.measured.setdefault(name, []).append(value)
        if (violation := result.get("violation")) is not None:
            row.violations.append(f"{self.command}\n{violation}")
            output = (self.folder / "output").read_text(errors="replace")[-8000:]
            print(f"\nVIOLATED  {row.promise.promise}\n{self.command}\n{output}\n{violation}", flush=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def case(promise: Promise, seed: int, number: int) -> dict[str, Any]:
    """Make the attempt with this number; return how often it attacked, and its measurements."""
    torch.manual_seed(number)
    made = promise.attempt(random.Random(f"{seed}/{promise.name}/{number}"))
    attacks, measured = made if isinstance(made, tuple) else (made, {})
    return {"attacks": attacks, "measured": measured}


def kill_all_of(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def soak(rows: list[Row], minutes: float, seed: int, workers: int, first: bool = False) -> None:
    """Run attempts in ``workers`` processes at a time until the time is over; attempts that are running by then may end.

    With ``first`` the first violation ends it.
    """
    until = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="ampkit-soak-") as name:
        folder, running = Path(name), []
        waiting = [*rows]
        try:
            while True:
                while len(running) < workers:
                    row = waiting.pop(0) if waiting else _poorest(rows, running, until)
                    if row is None:
                        break
                    running.append(Attempt(row, seed, row.number, folder))
                    row.number += 1
                if not running or (first and any(row.violations for row in rows)):
                    return
                ready, _, _ = select.select([attempt.ended for attempt in running], [], [], 0.2)
                for attempt in [attempt for attempt in running if attempt.ended in ready or attempt.is_late]:
                    running.remove(attempt)
                    attempt.end()
        finally:
            for attempt in running:
                kill_all_of(attempt.pid)


def _poorest(rows: list[Row], running: list[Attempt], until: float) -> Row | None:
    """Return the promise with the least time for its share so far; None when the time is over."""
    if time.monotonic() > until:
        return None

    def had(row: Row) -> float:
        return row.seconds + sum(one.seconds for one in running if one.row is row)

    return min(rows, key=lambda row: had(row) / row.promise.share)


def processor() -> str:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith("model name")).partition(": ")[2]
    return platform.processor() or platform.machine()


def commit() -> str:
    """The commit, with a plus where files differ from it; nothing outside of a checkout."""
    done = [
        subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
        for words in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    ]
    return done[0].stdout.strip() + ("+" if done[1].stdout.strip() else "")


def print_table(rows: list[Row]) -> None:
    print(f"\n{'group':<11}{'attacks':>9}{'violated':>10}  promise")
    for row in rows:
        print(f"{row.group:<11}{row.attacks:>9}{len(row.violations):>10}  {row.promise.promise}")
        for name, values in row.measured.items():
            print(f"{'':<32}{name}: {' '.join(f'{value:g}' for value in values[-6:])}")
    attacks, violated = sum(row.attacks for row in rows), sum(len(row.violations) for row in rows)
    print(f"{'in all':<11}{attacks:>9}{violated:>10}")
    for row in rows:
        for violation in row.violations[:5]:
            print(f"violated: {violation.partition(chr(10))[0]}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="soak", description="Injects faults into training runs: see tests/soak/__init__.py."
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="drawn and printed, if none is given")
    parser.add_argument("--only", default=None, help="a group, or the name of a promise")
    parser.add_argument("--attempt", type=int, default=None, help="the one case with this number, in this process")
    parser.add_argument("--first", action="store_true", help="end with the first violation")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="attempts at a time")
    parser.add_argument("--json", type=Path, default=None, help="where to write the table as JSON")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    rows = [Row(group, promise) for group, promises in GROUPS.items() for promise in promises]
    chosen = [row for row in rows if arguments.only in (None, row.group, row.promise.name)]
    if not chosen:
        names = ", ".join([*GROUPS, *(row.promise.name for row in rows)])
        parser.error(f"--only {arguments.only} is no group and no promise. There are: {names}")
    if arguments.attempt is not None:
        for row in chosen:
            print(row.promise.name, case(row.promise, seed, arguments.attempt))
        return 0
    gc.collect()
    gc.freeze()  # collections in attempts need not walk all of torch
    print(f"soak: {arguments.minutes:g} minutes, seed {seed}, {arguments.workers} processes", flush=True)
    began = time.monotonic()
    soak(chosen, arguments.minutes, seed, arguments.workers, arguments.first)
    print_table(chosen)
    if arguments.json is not None:
        about = {
            "commit": commit(),
            "date": time.strftime("%Y-%m-%d"),
            "processor": processor(),
            "processes": arguments.workers,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "seed": seed,
            "minutes": round((time.monotonic() - began) / 60, 1),
        }
        text = json.dumps({"about": about, "rows": [row.as_json() for row in chosen]}, indent=1)
        arguments.json.write_text(text + "\n")
    return int(any(row.violations for row in chosen))


if __name__ == "__main__":
    sys.exit(main())
