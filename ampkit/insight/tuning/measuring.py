"""The measurements of `tune`: a `Measurements` has a worker for each way, in a process that has computed nothing before.

First each way is examined for memory and losses. Then all workers live at once and take turns in changing order, so that another
job on the machine disturbs all alike. Ways that do not fit into memory together take their turns alone.
"""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
import time
from collections.abc import Sequence
from typing import Any

from ..processes import Worker, WorkerError
from .report import Row, Tuning
from .trainer import Trainer
from .ways import FLOAT32, Way, ways_of

TURN = 0.1  # seconds, or one step
ROUNDS = 3, 40  # at least, at most
WARM_UP = 3  # steps
STEPS = 12, 60  # steps whose losses are compared: at least, at most
_BEYOND = 1.3  # a step takes this many times as long while it is examined
_OF_EXAMINING = 0.6  # share of the time
_SPARE = 0.8  # share of the free memory that is used at once
_OF_A_PROCESS = 600 << 20  # bytes of a CUDA context, per process


class Measurements:
    """The measurements of all ways, by `measure`."""

    def __init__(self, located: Any, threads: int) -> None:
        importlib.import_module("torch._dynamo")  # else every optimizer imports it, in each process
        for descriptor in (1, 2):  # output of the script itself, in a dozen processes
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        # A fork has torch imported already, and torch has computed nothing.
        self._context = multiprocessing.get_context("fork" if hasattr(os, "fork") else "spawn")
        self._trainer_arguments, self._workers = (located, threads), dict[Way, Worker]()
        self.rows: dict[str, Row] = {}

    def measure(self, levels: Sequence[str], float16: bool | None, seconds: float, steps: int | None) -> Tuning:
        """Import the factory, train in float32 for some steps, and then in every way, for about ``seconds``."""
        begun = time.monotonic()
        plain = self._worker(Way(FLOAT32))
        try:
            self.about = {**plain.ask("start"), "threads": self._trainer_arguments[1]}
            to_start = time.monotonic() - begun
            seconds_of_step = min(plain.ask("turn", 1) for _ in range(WARM_UP))
            ways = ways_of(levels, self._precisions(float16), self.about["optimizers"])
            for_each = _OF_EXAMINING * seconds / len(ways)
            fitting = int((for_each - to_start) / seconds_of_step / _BEYOND)
            self.about["steps"] = steps or min(STEPS[1], max(STEPS[0], fitting))
            self._examine(ways, for_each)
            self._take_turns(list(self._workers), begun + seconds)
        finally:
            for worker in self._workers.values():
                worker.stop()
        return Tuning(self.about, self.rows)

    def _examine(self, ways: list[Way], for_each: float) -> None:
        """Measure memory and losses of the ways. Those that do not fit into memory beside the others take their turns at once."""
        room = _SPARE * (self.about["free_bytes"] or float("inf"))
        for way in ways:
            row = self.rows[str(way)] = Row(way)
            try:
                vars(row).update(self._worker(way).ask("examine", self.about["steps"]))
            except WorkerError as error:
                if way.level == FLOAT32:
                    raise
                row.error = str(error)
                self._workers.pop(way).stop()
                continue
            needed = (row.peak_bytes or 0) + _OF_A_PROCESS * (self.about["device"] == "cuda")
            if needed < room:
                room -= needed
            else:
                self._take_turns([way], time.monotonic() + for_each / 2)
                self._workers.pop(way).stop()

    def _worker(self, way: Way) -> Worker:
        if way not in self._workers:
            located, threads = self._trainer_arguments
            self._workers[way] = Worker(self._context, Trainer, located, way, threads)
        return self._workers[way]

    def _precisions(self, float16: bool | None) -> list[str]:
        """Return the lower precisions to measure on the device; ``about["left_out"]`` gets the reasons for the others."""
        on_cpu, takes_bfloat16 = self.about["device"] == "cpu", self.about["takes_bfloat16"]
        left_out = self.about["left_out"] = []
        if on_cpu and float16 is None:
            left_out.append("float16: on a CPU it takes 13 to 80 times as long as bfloat16; float16=True measures it")
        if not takes_bfloat16:
            left_out.append("bfloat16: this GPU does not compute in it")
        return ["float16"] * (not on_cpu if float16 is None else float16) + ["bfloat16"] * takes_bfloat16

    def _take_turns(self, ways: list[Way], until: float) -> None:
        """Measure the ways in turns of changing order, after a warm-up and a step that sets the number of steps per turn."""
        steps = WARM_UP
        for number in itertools.count(-2):
            if not ways or number >= ROUNDS[1] or (number >= ROUNDS[0] and time.monotonic() > until):
                return
            first, seconds_of = number % len(ways), {}
            for way in (ways[first:] + ways[:first])[:: 1 if number % 2 else -1]:
                try:
                    seconds_of[way] = self._workers[way].ask("turn", steps)
                except WorkerError as error:
                    ways.remove(way)
                    self.rows[str(way)].error = str(error)
            if number >= 0:
                for way, seconds in seconds_of.items():
                    self.rows[str(way)].seconds.append(seconds)
            else:
                steps = 1 if number == -2 else max(1, int(TURN / min(seconds_of.values(), default=TURN)))
