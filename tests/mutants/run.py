"""Plant named faults, and a sample of all others, each in a copy of the project: see the package's docstring."""

from __future__ import annotations

import argparse
import ast
import fnmatch
import hashlib
import importlib.util
import itertools
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ptx.build import ARCHITECTURES
from ptx.build import build as build_ptx

from . import reach
from .fault import Fault, StaleRow, named, rows
from .forks import ROOT, WORKERS, Job, Result, run_all
from .operators import faults_of

PARTS = ("ampkit", "csrc", "docs", "examples", "tests", "pyproject.toml", "setup.py", "README.md")
RECORD = ROOT / "build" / "reach.tsv"
#: Folders with tests of other things than ampkit's functions.
NOT_SAMPLED = {"project", "docs", "emulation", "simulated", "gpu", "mutants"}
SECONDS_OF_TESTS = 45.0  # for a sampled fault, as the tests took without one
MOST_SURVIVORS = 0.10

SWITCH = """
#pragma once
#include <stdlib.h>
// Read once, when the library is loaded.
static const int ampkit_chosen_mutant = getenv("AMPKIT_MUTANT") ? atoi(getenv("AMPKIT_MUTANT")) : 0;
#define AMPKIT_MUTANT(number) (ampkit_chosen_mutant == (number))
#ifdef AMPKIT_CHOSEN  // for nvcc
#undef AMPKIT_MUTANT
#define AMPKIT_MUTANT(number) (AMPKIT_CHOSEN == (number))
#endif
"""


def copy_of_project(to: Path) -> Path:
    to.mkdir()
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, to / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, to / part)
    return to


def copies_of_project(scratch: Path) -> list[Path]:
    """Return a copy for each worker."""
    return [copy_of_project(Path(tempfile.mkdtemp(dir=scratch), "copy")) for _ in range(WORKERS)]


def write_source(path: Path, text: str) -> None:
    """Write a source and drop its bytecode: Python detects changes by size and time in seconds, and neither need differ here."""
    path.write_text(text)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def job_in_python(fault: Fault, tests: list[str], folder: Path) -> Job:
    path = folder / fault.file
    sound, faulty = path.read_text(), fault.planted(folder)
    change = dict(before=lambda: write_source(path, faulty), after=lambda: write_source(path, sound))
    return Job(tests, folder, fault.extension, **change)


class Tally:
    """A tally that prints a line for each fault."""

    def __init__(self, title: str) -> None:
        self.title, self.planted, self.stale = title, 0, 0
        self.survived: list[Fault] = []

    def add_stale(self, what: object, why: str) -> None:
        self.stale += 1
        print(f"STALE     {what}: {why}", flush=True)

    def add(self, fault: Fault, result: Result) -> None:
        self.planted += 1
        if result.status == 0:
            self.survived.append(fault)
        by = f" | {result.failed.removeprefix('tests/') or 'an import'}" if result.status else ""
        print(f"{'killed' if by else 'SURVIVED':<8}  {fault}{by}, {result.seconds:.1f} s", flush=True)

    def print(self) -> None:
        print(f"\n{self.title}: {len(self.survived)} of {self.planted} survived, {self.stale} are stale")
        for fault in self.survived:
            print(f"  {fault}")


# Named faults


def plant_named(pattern: str, table: str, scratch: Path) -> Tally:
    tally, faults = Tally("Named faults"), []
    for row in rows(table):
        if any(fnmatch.fnmatchcase(text, pattern) for text in (row["promise"], row["where"])):
            try:
                faults.append(named(row, ROOT))
            except StaleRow as error:
                tally.add_stale(row["promise"], str(error))
    in_cpp = [fault for fault in faults if fault.is_cpp]
    in_python = [fault for fault in faults if not fault.is_cpp]
    build, built = None, scratch / "cpp"
    try:
        if in_cpp:
            build = start_build(copy_of_project(built), in_cpp)  # goes on while the faults in Python have their turns
        if in_python:
            copies = copies_of_project(scratch)
            check_baseline(in_python, copies[0], scratch)
            jobs = (lambda at, fault=fault: job_in_python(fault, names(fault), copies[at]) for fault in in_python)
            run_all(jobs, scratch, lambda index, result: judge(tally, in_python[index], result))
        if build is not None:
            if build.wait():
                raise SystemExit(f"{(built / 'build.log').read_text()}\nThe build with the faults in C++ failed.")
            check_baseline(in_cpp, built, scratch)
            runs = [(n, fault, one) for n, fault in enumerate(in_cpp, start=1) for one in fault.extensions]
            jobs = (lambda _, run=run: job_in_cpp(names(run[1]), built, run[2], run[0]) for run in runs)
            run_all(jobs, scratch, lambda index, result: judge(tally, runs[index][1], result))
    finally:
        if build is not None and build.poll() is None:
            os.killpg(build.pid, signal.SIGTERM)
            build.wait()
    return tally


def job_in_cpp(tests: list[str], folder: Path, extension: str, number: int) -> Job:
    """A job with the fault of this number, or with none (0). On "ptx" nvcc first makes PTX of the kernels with this fault."""
    environment = {"AMPKIT_MUTANT": str(number)}
    if extension != "ptx":
        return Job(tests, folder, extension, environment)
    environment |= {"AMPKIT_EMULATION": "ptx", "AMPKIT_PTX": str(folder / f"ptx{number}" / ARCHITECTURES[0])}
    flags = ("-include", str(folder / "switch.h"), f"-DAMPKIT_CHOSEN={number}")
    build = lambda: build_ptx(folder / f"ptx{number}", ARCHITECTURES[:1], folder / "csrc", flags)  # noqa: E731
    return Job(tests, folder, "emulated", environment, before=build, time_limit=600.0)


def names(fault: Fault) -> list[str]:
    return [f"tests/{name}" for name in fault.tests]


def judge(tally: Tally, fault: Fault, result: Result) -> None:
    if result.status in (0, 1):
        tally.add(fault, result)
    else:  # no such test, or nothing that can be imported
        tally.add_stale(fault, f"pytest ended with status {result.status}:\n{result.log[-3000:]}")


def check_baseline(faults: list[Fault], folder: Path, logs: Path) -> None:
    """Check that every test passes without a fault; else no later result would mean anything."""
    tests = defaultdict(set)
    for fault in faults:
        for extension in fault.extensions:
            tests[extension].update(names(fault))

    def report(_: int, result: Result) -> None:
        if result.status != 0:
            raise SystemExit(f"{result.log}\nThe tests fail without any fault: {result.failed}")

    def make(tests: set[str], extension: str) -> Job:
        return replace(job_in_cpp(sorted(tests), folder, extension, 0), time_limit=1200.0)

    run_all((lambda _, one=one: make(tests[one], one) for one in sorted(tests)), logs, report)


def start_build(folder: Path, faults: list[Fault]) -> subprocess.Popen:
    """Build the libraries of the copy in ``folder`` with all of these faults, each behind a switch with its number from 1.

    So ``old`` and ``new`` are expressions of one type, or statements that end with a semicolon and declare nothing.
    """
    by_place = sorted(enumerate(faults, start=1), key=lambda pair: -pair[1].start)
    for number, fault in by_place:  # from the end of a file, so that places stay
        if fault.old.endswith(";"):
            new = f"if (AMPKIT_MUTANT({number})) {{ {fault.new} }} else {{ {fault.old} }}"
        else:
            new = f"(AMPKIT_MUTANT({number}) ? ({fault.new}) : ({fault.old}))"
        source = (folder / fault.file).read_bytes()
        (folder / fault.file).write_bytes(source[: fault.start] + new.encode() + source[fault.end :])
    commands, python = [], shlex.quote(sys.executable)
    extensions = {one for fault in faults for one in fault.extensions}
    if extensions - {"emulated", "ptx"}:  # else the libraries are sound as they are
        for library in (folder / "ampkit").glob("*.so"):
            library.unlink()
        commands.append(f"{python} setup.py --quiet build_ext --inplace")
    if extensions & {"emulated", "ptx"}:
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
        how = dict(shell=True, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
        return subprocess.Popen(" && ".join(commands), **how)


# Sampled faults


def plant_sample(seed: int, until: float, only: str, scratch: Path) -> Tally:
    """Plant faults in an order that ``seed`` gives, until the clock shows ``until``."""
    tally, planted = Tally(f"Sampled faults, seed {seed}"), []
    copies = copies_of_project(scratch)
    tests_of, seconds_of = record_of_reach(copies, scratch)

    def jobs() -> Iterator[Callable[[int], Job]]:
        for fault, first in sampled(seed, only):
            if time.monotonic() > until:
                return
            if tests := fastest(tests_of[f"{fault.file}:{first}"], seconds_of):
                planted.append(fault)
                yield lambda worker, fault=fault, tests=tests: job_in_python(fault, tests, copies[worker])

    run_all(jobs(), scratch, lambda index, result: tally.add(planted[index], result))
    return tally


def sampled(seed: int, only: str) -> Iterator[tuple[Fault, int]]:
    """Yield each fault of files like ``only``, in an order that ``seed`` gives, with the first line of its function."""
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "ampkit").rglob("*.py"))
    faults = [pair for file in files if fnmatch.fnmatch(file, only) for pair in faults_of(ROOT, file)]
    random.Random(seed).shuffle(faults)
    for fault, first in faults:
        with suppress(SyntaxError):  # such as a condition that binds a name
            ast.parse(fault.planted(ROOT))
            yield fault, first


def fastest(tests: Iterable[str], seconds_of: dict[str, float]) -> list[str]:
    """The fastest case of each test function, fast ones first, within `SECONDS_OF_TESTS`."""
    cases: dict[str, str] = {}
    for test in sorted(tests, key=lambda test: (seconds_of[test], test)):
        cases.setdefault(test.partition("[")[0], test)
    sums = itertools.accumulate(seconds_of[test] for test in cases.values())
    return [
        test for place, (test, total) in enumerate(zip(cases.values(), sums)) if place == 0 or total <= SECONDS_OF_TESTS
    ]


def record_of_reach(copies: list[Path], scratch: Path) -> tuple[dict[str, set[str]], dict[str, float]]:
    """The tests that reach each function, and the seconds of each that passes; kept until a source changes."""
    sources = [path for part in ("ampkit", "tests") for path in sorted((ROOT / part).rglob("*.py"))]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    if not RECORD.exists() or not RECORD.read_text().startswith(digest):
        began = time.monotonic()
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text(f"{digest}\n{record_reach(copies, scratch)}")
        print(f"every test file has run once, in {time.monotonic() - began:.0f} s", flush=True)
    tests_of = defaultdict(set)
    lines = [line.split("\t") for line in RECORD.read_text().splitlines()[1:]]
    seconds_of = {test: float(what[8:]) for test, what in lines if what.startswith("seconds:")}
    for test, what in lines:
        if test in seconds_of or test.startswith("fixture:"):
            tests_of[what].add(test)
    for tests in list(tests_of.values()):
        for fixture in [test for test in tests if test.startswith("fixture:")]:
            tests.remove(fixture)
            tests |= tests_of[fixture]
    return tests_of, seconds_of


def record_reach(copies: list[Path], scratch: Path) -> str:
    """Run each test file once, without a fault."""
    paths = [path.relative_to(ROOT) for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    files = [str(path) for path in paths if path.parts[1] not in NOT_SAMPLED]
    record = scratch / "reach.tsv"

    def make(file: str, folder: Path) -> Job:
        shutil.copy(reach.__file__, folder / "sitecustomize.py")
        environment = {reach.RECORD: str(record), reach.FOLDER: str(folder)}
        return Job([file], folder, "require", environment, (), lambda: [reach.Plugin()], time_limit=900.0)

    def report(index: int, result: Result) -> None:
        if result.status not in (0, 5):
            print(f"{files[index]}: status {result.status}, {result.failed}: failing tests are left out", flush=True)

    run_all((lambda worker, file=file: make(file, copies[worker]) for file in files), scratch, report)
    for folder in copies:
        (folder / "sitecustomize.py").unlink(missing_ok=True)
    return record.read_text()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--promises", default="*", help="which named faults: a pattern for the promise or the place")
    parser.add_argument("--table", default="promises", help="of named faults: promises, or cuda")
    parser.add_argument("--sample", default="*", help="a pattern for the files of sampled faults; '' for none")
    parser.add_argument("--minutes", type=float, default=20.0, help="for everything; the sample takes what is left")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    until, tallies = time.monotonic() + 60 * arguments.minutes, []
    with tempfile.TemporaryDirectory(prefix="ampkit-mutants-") as name:
        scratch = Path(name).resolve()
        if arguments.promises:
            tallies.append(plant_named(arguments.promises, arguments.table, scratch))
        if arguments.sample:
            tallies.append(plant_sample(arguments.seed, until, arguments.sample, scratch))
    for tally in tallies:
        tally.print()
    named_ones, *samples = tallies if arguments.promises else [Tally(""), *tallies]
    too_many = any(len(tally.survived) > MOST_SURVIVORS * tally.planted for tally in samples)
    return bool(named_ones.survived or named_ones.stale or too_many)


if __name__ == "__main__":
    sys.exit(main())
