"""Plants the faults of table.py, one at a time and in copies of the project, and tells which of them the tests notice.

    make mutants                       all of them
    make mutants MUTANTS='*lamb*'      those whose names match

A fault that no test notices has *survived*: a test is missing. A row whose text does not stand in its file exactly once is
*stale*. Either makes the exit status 1.

A fault in Python is written into a copy, and taken out again. Faults in C++ go into one build together, each behind a
question for the environment variable AMPKIT_MUTANT, which chooses at run time. The tests of a fault run in a fork of this
process, which has imported torch and pytest but nothing of ampkit: that saves three seconds of work each time.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import hypothesis  # noqa: F401  (what tests import, and takes long)
import pytest
import torch._dynamo

from .table import MUTANTS, Mutant, StaleRow, planted

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("ampkit", "csrc", "docs", "examples", "tests", "pyproject.toml", "setup.py", "README.md")
WORKERS = min(2, os.cpu_count() or 1)

SWITCH = """
#pragma once
#include <stdlib.h>
// Read once, when the library is loaded.
static const int ampkit_chosen_mutant = getenv("AMPKIT_MUTANT") ? atoi(getenv("AMPKIT_MUTANT")) : 0;
#define AMPKIT_MUTANT(number) (ampkit_chosen_mutant == (number))
"""


@dataclass
class Job:
    """One run of pytest in ``folder``; ``before`` plants a fault there, and ``after`` takes it out."""

    tests: list[str]
    folder: Path
    extension: str
    number: int = 0
    before: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None
    time_limit: float = 240.0


@dataclass
class Result:
    """What came of a job: pytest's exit status, the first test that failed, and all that was printed."""

    status: int
    failed: str
    log: str
    seconds: float


# Copies and builds


def copy_of_project(to: Path) -> Path:
    to.mkdir()
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, to / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, to / part)
    return to


def write_source(path: Path, text: str) -> None:
    """Python tells changes of a file by its size and its time in seconds: here neither need differ."""
    path.write_text(text)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def start_build(folder: Path, mutants: list[Mutant]) -> subprocess.Popen:
    """Build the libraries of the copy in ``folder`` with all of these faults, numbered from 1, behind the switch."""
    for number, mutant in enumerate(mutants, start=1):
        (folder / mutant.file).write_text(planted(mutant, folder, number))
    commands, python = [], shlex.quote(sys.executable)
    if any(mutant.extensions != ("emulated",) for mutant in mutants):  # else the libraries are sound as they are
        for library in (folder / "ampkit").glob("*.so"):
            library.unlink()
        commands.append(f"{python} setup.py --quiet build_ext --inplace")
    if any("emulated" in mutant.extensions for mutant in mutants):
        commands.append(f"{python} tests/emulation/build.py build/emulation")
    (folder / "switch.h").write_text(SWITCH)
    environment = {
        "MAX_JOBS": "1",
        **os.environ,
        "AMPKIT_BUILD_EXT": "1",
        "AMPKIT_CUDA": "0",
        "CFLAGS": f"{os.environ.get('CFLAGS', '')} -include {folder / 'switch.h'}",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # where ninja is
    }
    with open(folder / "build.log", "w") as log:
        return subprocess.Popen(
            " && ".join(commands),
            shell=True,
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def job_in_python(mutant: Mutant, folder: Path) -> Job:
    path = folder / mutant.file
    sound, faulty = path.read_text(), planted(mutant, folder)
    return Job(
        list(mutant.tests),
        folder,
        mutant.extension,
        before=lambda: write_source(path, faulty),
        after=lambda: write_source(path, sound),
    )


# Running


def start(job: Job, log: Path) -> int:
    """Fork, and run pytest in the child; returns its process id."""
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
        status = run_pytest(job)
        sys.stdout.flush()
    finally:
        os._exit(status)


def run_pytest(job: Job) -> int:
    os.chdir(job.folder)
    os.environ |= {"AMPKIT_EXTENSION": job.extension, "AMPKIT_MUTANT": str(job.number), "OMP_NUM_THREADS": "1"}
    os.environ["PYTHONPATH"] = str(job.folder)
    torch.set_num_threads(1)
    ours = (ROOT, ROOT / "tests")
    sys.path[:] = [str(job.folder), *(path for path in sys.path if Path(path).resolve() not in ours)]
    if not Path(importlib.util.find_spec("ampkit").origin).is_relative_to(job.folder):
        print(f"ampkit is not imported from the copy in {job.folder}")
        return 3
    part = "switch and not slow" if job.extension == "off" else "not slow"  # of make test
    names = [f"tests/{name}" for name in job.tests]
    return int(pytest.main(["-x", "-q", "-rf", "--tb=short", "-m", part, "-p", "no:cacheprovider", *names]))


def result_of(process: int, job: Job, log: Path, started: float) -> Result | None:
    """What came of a job; None while it runs."""
    finished, status = os.waitpid(process, os.WNOHANG)
    seconds = time.monotonic() - started
    if not finished:
        if seconds < job.time_limit:
            return None
        end(process)
    text = log.read_text(errors="replace")
    if not finished:
        return Result(1, "a test that does not end", text, seconds)
    if os.WIFSIGNALED(status):
        return Result(1, f"a crash (signal {os.WTERMSIG(status)})", text, seconds)
    failed = [line[7:].partition(" - ")[0] for line in text.splitlines() if line.startswith("FAILED ")]
    return Result(os.WEXITSTATUS(status), failed[0] if failed else "", text, seconds)


def end(process: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)


def run_all(jobs: list[Callable[[int], Job]], logs: Path, report: Callable[[int, Result], None]) -> None:
    """`WORKERS` at a time. A job is made when its turn comes, by a function of the worker's number."""
    waiting = list(enumerate(jobs))[::-1]
    running: dict[int, tuple[int, Job, int, Path, float]] = {}
    try:
        while waiting or running:
            for worker in range(WORKERS):
                if waiting and worker not in running:
                    index, make = waiting.pop()
                    job, log = make(worker), logs / f"{worker}.log"
                    running[worker] = (index, job, start(job, log), log, time.monotonic())
            for worker, (index, job, process, log, started) in list(running.items()):
                result = result_of(process, job, log, started)
                if result is not None:
                    del running[worker]
                    job.after()
                    report(index, result)
            time.sleep(0.02)
    finally:
        for _, _, process, _, _ in running.values():
            end(process)


def check_baseline(mutants: list[Mutant], folder: Path, logs: Path) -> None:
    """Without a fault every test passes; else nothing that follows would mean anything."""
    jobs = []
    for extension in sorted({extension for mutant in mutants for extension in mutant.extensions}):
        tests = sorted({test for mutant in mutants if extension in mutant.extensions for test in mutant.tests})
        jobs.append(Job(tests, folder, extension, time_limit=1200.0))

    def report(_: int, result: Result) -> None:
        if result.status != 0:
            print(result.log)
            raise SystemExit(f"The tests fail without any fault: {result.failed}")

    run_all([lambda _, job=job: job for job in jobs], logs, report)


# The whole


class Tally:
    """Prints a line for each fault, and counts."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.killed = 0
        self.survived: list[Mutant] = []
        self.stale: list[Mutant] = []

    def add_stale(self, mutant: Mutant, why: str) -> None:
        self.stale.append(mutant)
        self._print("STALE", mutant, why)

    def add(self, mutant: Mutant, result: Result) -> None:
        if result.status == 1:
            self.killed += 1
            self._print("killed", mutant, f"by {result.failed.removeprefix('tests/')} in {result.seconds:.1f} s")
        elif result.status == 0:
            self.survived.append(mutant)
            self._print("SURVIVED", mutant, f"though {mutant.breaks!r} holds no more")
        else:  # no such test, or nothing that can be imported
            self.add_stale(mutant, f"pytest ended with status {result.status}:\n{result.log[-3000:]}")

    def close(self) -> int:
        stale = f", {len(self.stale)} stale" if self.stale else ""
        seconds = time.monotonic() - self.began
        print(f"{self.killed} killed, {len(self.survived)} survived{stale}, in {seconds:.0f} s")
        for mutant in (*self.survived, *self.stale):
            print(f"  {mutant.name}")
        return 1 if self.survived or self.stale else 0

    def _print(self, what: str, mutant: Mutant, how: str) -> None:
        print(f"{what:<8}  {mutant.name}: {how}", flush=True)


def run_in_python(mutants: list[Mutant], scratch: Path, tally: Tally) -> None:
    copies = [copy_of_project(scratch / f"python{worker}") for worker in range(WORKERS)]
    check_baseline(mutants, copies[0], scratch)
    jobs = [lambda worker, mutant=mutant: job_in_python(mutant, copies[worker]) for mutant in mutants]
    run_all(jobs, scratch, lambda index, result: tally.add(mutants[index], result))


def run_in_cpp(mutants: list[Mutant], folder: Path, scratch: Path, tally: Tally) -> None:
    check_baseline(mutants, folder, scratch)
    runs = [(number, mutant, one) for number, mutant in enumerate(mutants, start=1) for one in mutant.extensions]
    jobs = [
        lambda _, number=number, mutant=mutant, extension=extension: Job(list(mutant.tests), folder, extension, number)
        for number, mutant, extension in runs
    ]

    def report(index: int, result: Result) -> None:
        _, mutant, extension = runs[index]
        tally.add(mutant if extension == mutant.extension else replace(mutant, name=f"{mutant.name}, emulated"), result)

    run_all(jobs, scratch, report)


def main(patterns: list[str]) -> int:
    tally, usable = Tally(), []
    for mutant in MUTANTS:
        if not patterns or any(fnmatch.fnmatchcase(mutant.name, pattern) for pattern in patterns):
            try:
                planted(mutant, ROOT)
                usable.append(mutant)
            except StaleRow as error:
                tally.add_stale(mutant, str(error))
    in_cpp = [mutant for mutant in usable if mutant.is_cpp]
    in_python = [mutant for mutant in usable if not mutant.is_cpp]
    with tempfile.TemporaryDirectory(prefix="ampkit-mutants-") as name:
        scratch, build = Path(name).resolve(), None
        try:
            if in_cpp:
                built = copy_of_project(scratch / "cpp")
                build = start_build(built, in_cpp)  # goes on while the faults in Python have their turns
            if in_python:
                run_in_python(in_python, scratch, tally)
            if build is not None:
                if build.wait():
                    raise SystemExit(f"{(built / 'build.log').read_text()}\nThe build with the faults in C++ failed.")
                run_in_cpp(in_cpp, built, scratch, tally)
        finally:
            if build is not None and build.poll() is None:
                os.killpg(build.pid, signal.SIGTERM)
                build.wait()
    return tally.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
