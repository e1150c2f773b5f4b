"""Plant faults, each in a copy of the project: see the package's docstring."""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from ptx.build import ARCHITECTURES
from ptx.build import build as build_ptx

from .fault import Fault, StaleRow, named, rows
from .forks import ROOT, WORKERS, Job, Result, run_all

PARTS = ("ampkit", "csrc", "docs", "examples", "tests", "pyproject.toml", "setup.py", "README.md")

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


def write_source(path: Path, text: str) -> None:
    """Write a source and drop its bytecode: Python detects changes by size and time in seconds, and neither need differ here."""
    path.write_text(text)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def job_in_python(fault: Fault, folder: Path) -> Job:
    path = folder / fault.file
    sound, faulty = path.read_text(), fault.planted(folder)
    change = dict(before=lambda: write_source(path, faulty), after=lambda: write_source(path, sound))
    return Job(names(fault), folder, fault.extension, **change)


class Tally:
    """A tally that prints a line for each fault."""

    def __init__(self) -> None:
        self.planted, self.stale = 0, 0
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
        print(f"\n{len(self.survived)} of {self.planted} survived, {self.stale} are stale")
        for fault in self.survived:
            print(f"  {fault}")


def plant_named(pattern: str, table: str, scratch: Path) -> Tally:
    tally, faults = Tally(), []
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
            copies = [copy_of_project(scratch / f"python{worker}") for worker in range(WORKERS)]
            check_baseline(in_python, copies[0], scratch)
            jobs = (lambda at, fault=fault: job_in_python(fault, copies[at]) for fault in in_python)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--promises", default="*", help="which faults: a pattern for the promise or the place")
    parser.add_argument("--table", default="promises", help="promises, or cuda")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ampkit-mutants-") as name:
        tally = plant_named(arguments.promises, arguments.table, Path(name).resolve())
    tally.print()
    return bool(tally.survived or tally.stale)


if __name__ == "__main__":
    sys.exit(main())
