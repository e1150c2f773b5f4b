"""The measurements of `tune`: `main` is what a process does that starts a worker for each way.

It reads a task as a line of JSON and writes what it finds, a line of JSON each. First each way is examined: memory and
losses. Then all live at once and take turns in changing order, so that another job on the machine disturbs all alike. Those
for which memory does not suffice have their turns alone.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch._dynamo  # noqa: F401  every optimizer would, in each process

from ..processes import Worker, WorkerError
from .factory import Source
from .trainer import Trainer
from .ways import FLOAT32, Way, ways_of

TURN = 0.1  # seconds, or one step
ROUNDS = 3, 40  # at least, at most
WARM_UP = 3  # steps
STEPS = 12, 60  # whose losses are compared: at least, at most
_BEYOND = 1.3  # times as long as alone a step takes while it is examined
_OF_EXAMINING = 0.6  # of the time
_SPARE = 0.8  # of the free memory are used at once
_OF_A_PROCESS = 600 << 20  # bytes of a CUDA context
Found = Iterator[tuple[str, Any]]


def measure(task: dict[str, Any]) -> Found:
    """``about`` the factory; for each way ``examined`` and ``timed``, or ``failed`` and why; ``share`` of the work that is done."""
    source, begun = Source(**task["source"]), time.monotonic()
    # A fork of this process has torch imported, which has computed nothing.
    context = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")
    workers: dict[Way, Worker] = {}

    def worker(way: Way) -> Worker:
        if way not in workers:
            workers[way] = Worker(context, Trainer, source, way, task["threads"])
        return workers[way]

    try:
        about = worker(Way(FLOAT32)).ask("start")
        to_start = time.monotonic() - begun
        seconds = min(worker(Way(FLOAT32)).ask("turn", 1) for _ in range(WARM_UP))
        dtypes, left_out = _precisions(about, task["float16"])
        ways = ways_of(task["levels"], dtypes, about["optimizers"])
        for_each = _OF_EXAMINING * task["seconds"] / len(ways)
        steps = task["steps"] or min(STEPS[1], max(STEPS[0], int((for_each - to_start) / seconds / _BEYOND)))
        yield "about", {**about, "left_out": left_out, "steps": steps, "threads": task["threads"]}
        room = _SPARE * (about["free_bytes"] or float("inf"))
        for number, way in enumerate(ways, start=1):
            try:
                found = worker(way).ask("examine", steps)
            except WorkerError as error:
                if way.level == FLOAT32:
                    raise
                yield "failed", [vars(way), str(error)]
                workers.pop(way).stop()
            else:
                yield "examined", [vars(way), found]
                needed = (found["peak_bytes"] or 0) + _OF_A_PROCESS * (about["device"] == "cuda")
                if needed < room:
                    room -= needed
                else:
                    yield from _rounds({way: worker(way)}, time.monotonic() + for_each / 2)
                    workers.pop(way).stop()
            yield "share", _OF_EXAMINING * number / len(ways)
        for found in _rounds(workers, begun + task["seconds"]):
            yield found
            yield "share", min(1.0, max(_OF_EXAMINING, (time.monotonic() - begun) / task["seconds"]))
    finally:
        for one in workers.values():
            one.stop()


def _precisions(about: dict[str, Any], float16: bool | None) -> tuple[list[str], list[str]]:
    """The lower precisions that make sense on the device, and why one is left out."""
    on_cpu, left_out = about["device"] == "cpu", []
    if on_cpu and float16 is None:
        left_out.append("float16: on a CPU it takes 13 to 80 times as long as bfloat16; float16=True measures it")
    if not about["takes_bfloat16"]:
        left_out.append("bfloat16: this GPU does not compute in it")
    return ["float16"] * (not on_cpu if float16 is None else float16) + ["bfloat16"] * about["takes_bfloat16"], left_out


def _rounds(workers: dict[Way, Worker], until: float) -> Found:
    """Turns of all in changing order, after a warm-up and a step that tells how many make a turn."""
    ways, steps = list(workers), WARM_UP
    for number in itertools.count(-2):
        if not ways or number >= ROUNDS[1] or (number >= ROUNDS[0] and time.monotonic() > until):
            return
        first, found = number % len(ways), {}
        for way in (ways[first:] + ways[:first])[:: 1 if number % 2 else -1]:
            try:
                found[way] = workers[way].ask("turn", steps)
            except WorkerError as error:
                ways.remove(way)
                yield "failed", [vars(way), str(error)]
        if number >= 0:
            yield from (("timed", [vars(way), seconds]) for way, seconds in found.items())
        else:
            steps = 1 if number == -2 else max(1, int(TURN / min(found.values(), default=TURN)))


def main() -> None:
    # What the script's own code prints is none of the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        for found in measure(json.loads(sys.stdin.readline())):
            print(json.dumps(found), file=answers, flush=True)
    except WorkerError as error:
        print(json.dumps(["error", [str(error), error.details]]), file=answers, flush=True)
