"""Which tests notice which faults: one case of each test function, all of them for each fault, and no stop at the first failure.

    PYTHONPATH=tests python -m mutants.matrix [--faults 300] [--seed 0] [--only 'ampkit/casting/*'] [--tests tests/o1 ...]
    PYTHONPATH=tests python -m mutants.matrix --needless

The first line plants sampled faults. Each adds a line of JSON to build/kills.jsonl: the fault, the tests that ran, and those
that noticed. A fault that stands there is not planted again, so a run that was cut off goes on. The second line prints the test
functions that may go together: at least three faults were tried in what each reaches, and what it notices is noticed by a test that
stays. A test that states a promise of its own stays all the same: that is for people to judge.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from . import run
from .fault import Fault
from .forks import ROOT, Result, run_all

KILLS = ROOT / "build" / "kills.jsonl"
LEAST_FAULTS = 3


def failed_in(result: Result) -> list[str]:
    lines = [line for line in result.log.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return sorted({run.function_of(line.split(" ")[1]) for line in lines})


def plant(seed: int, count: int, only: str, under: tuple[str, ...]) -> None:
    known, planted = {line["fault"] for line in kills()}, []
    with tempfile.TemporaryDirectory(prefix="ampkit-matrix-") as name:
        scratch, to_the_end = Path(name).resolve(), dict(options=(), time_limit=1200.0)
        unknown = lambda fault, tests, _: [] if str(fault) in known else tests  # noqa: E731
        jobs = run.sampled_jobs(seed, only, scratch, unknown, planted, under, **to_the_end)
        run_all(itertools.islice(jobs, count), scratch, lambda index, result: keep(*planted[index], result))


def keep(fault: Fault, tests: list[str], result: Result) -> None:
    """Print and store the tests that noticed the fault: all of them, if the process ended without a summary."""
    ran = sorted(map(run.function_of, tests))
    failed = failed_in(result) if result.status in (0, 1) and result.log.strip() else ran
    print(f"{len(failed):>4} of {len(ran):>4} tests notice {fault}, {result.seconds:.0f} s", flush=True)
    KILLS.parent.mkdir(exist_ok=True)
    with open(KILLS, "a") as file:
        file.write(json.dumps({"fault": str(fault), "ran": ran, "failed": failed}) + "\n")


def kills() -> list[dict]:
    return [json.loads(line) for line in KILLS.read_text().splitlines()] if KILLS.exists() else []


def needless(lines: list[dict]) -> list[str]:
    """The test functions that may be dropped together, beginning with those that notice fewest faults."""
    tried, noticed = defaultdict(int), defaultdict(set)
    left = {number: len(line["failed"]) for number, line in enumerate(lines)}
    for number, line in enumerate(lines):
        for test in line["ran"]:
            tried[test] += 1
        for test in line["failed"]:
            noticed[test].add(number)
    gone = []
    for test in sorted(tried, key=lambda test: (len(noticed[test]), test)):
        if tried[test] >= LEAST_FAULTS and all(left[number] > 1 for number in noticed[test]):
            gone.append(test)
            for number in noticed[test]:
                left[number] -= 1
    return gone


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=300, help="how many more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="*", help="a pattern for the files of faults")
    parser.add_argument("--tests", nargs="+", default=["tests/"], help="folders and files whose tests are run")
    parser.add_argument("--needless", action="store_true", help="plant nothing: print the tests that may go together")
    arguments = parser.parse_args()
    if arguments.needless:
        print("\n".join(needless(kills())))
    else:
        plant(arguments.seed, arguments.faults, arguments.only, tuple(arguments.tests))
    return 0


if __name__ == "__main__":
    sys.exit(main())
