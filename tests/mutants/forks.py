"""Run pytest in forks of this process, which has imported torch but nothing of ampkit: that saves three seconds each time."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis  # noqa: F401  (what tests import, and takes long)
import pytest
import torch._dynamo

ROOT = Path(__file__).resolve().parents[2]
WORKERS = int(os.environ.get("AMPKIT_WORKERS", min(2, os.cpu_count() or 1)))


@dataclass
class Job:
    """A run of pytest in ``folder``; ``before`` plants a fault there, and ``after`` removes it."""

    tests: list[str]
    folder: Path
    extension: str = "require"
    environment: dict[str, str] = field(default_factory=dict)
    before: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None
    time_limit: float = 240.0


@dataclass
class Result:
    """The result of a job: pytest's exit status, the first test that failed, and the printed text."""

    status: int
    failed: str
    log: str
    seconds: float


def run_all(jobs: Iterator[Callable[[int], Job]], logs: Path, report: Callable[[int, Result], None]) -> None:
    """Run all jobs, `WORKERS` at a time. A job is made when its turn comes, by a function of the worker's number."""
    waiting = enumerate(jobs)
    running: dict[int, tuple[int, Job, int, Path, float]] = {}
    try:
        while True:
            for worker in range(WORKERS):
                if worker not in running and (following := next(waiting, None)) is not None:
                    index, make = following
                    job, log = make(worker), logs / f"{worker}.log"
                    running[worker] = (index, job, _start(job, log), log, time.monotonic())
            if not running:
                return
            for worker, (index, job, process, log, started) in list(running.items()):
                result = _result_of(process, job, log, started)
                if result is not None:
                    del running[worker]
                    job.after()
                    report(index, result)
            time.sleep(0.02)
    finally:
        for _, _, process, _, _ in running.values():
            _end(process)


def _start(job: Job, log: Path) -> int:
    """Fork, and run pytest in the child; return its process id."""
    job.before()
    process = os.fork()
    if process:
        return process
    status = 3
    try:
        os.setpgid(0, 0)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        status = _run_pytest(job)
        sys.stdout.flush()
    finally:
        os._exit(status)


def _run_pytest(job: Job) -> int:
    os.chdir(job.folder)
    os.environ |= {"AMPKIT_EXTENSION": job.extension, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(job.folder)}
    os.environ |= job.environment
    torch.set_num_threads(1)
    checkout = (ROOT, ROOT / "tests")
    sys.path[:] = [str(job.folder), *(path for path in sys.path if Path(path).resolve() not in checkout)]
    if not Path(importlib.util.find_spec("ampkit").origin).is_relative_to(job.folder):
        print(f"ampkit is not imported from the copy in {job.folder}")
        return 3
    part = "switch and not slow" if job.extension == "off" else "not slow"  # of make test
    return int(pytest.main(["-q", "-x", "-rfE", "--tb=short", "-m", part, "-p", "no:cacheprovider", *job.tests]))


def _result_of(process: int, job: Job, log: Path, started: float) -> Result | None:
    """Return the result of a job; None while it runs."""
    finished, status = os.waitpid(process, os.WNOHANG)
    seconds = time.monotonic() - started
    if not finished:
        if seconds < job.time_limit:
            return None
        _end(process)
    text = log.read_text(errors="replace")
    if not finished:
        return Result(1, "a test that does not end", text, seconds)
    if os.WIFSIGNALED(status):
        return Result(1, f"a crash (signal {os.WTERMSIG(status)})", text, seconds)
    lines = text.splitlines()
    failed = [line.partition(" ")[2].partition(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return Result(os.WEXITSTATUS(status), failed[0] if failed else "", text, seconds)


def _end(process: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
