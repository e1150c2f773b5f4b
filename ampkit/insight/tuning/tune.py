"""`tune`, and ``ampkit tune``: train the model of a factory in every way that the device supports, side by side.

The measurements run in other processes, so that this process, its environment and its torch stay unchanged.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...patching import PatchSet
from ..processes import KEEP_FREED, Worker, WorkerError
from .report import Row, Tuning
from .trainer import Trainer, located
from .ways import FLOAT32, LEVELS, Way, ways_of

EXAMPLE = "ampkit tune examples/tuning/models.py:lstm --levels O2 --seconds 2"
_IS_CHILD = "AMPKIT_TUNING"
_ENVIRONMENT = {**KEEP_FREED, _IS_CHILD: "1"}

TURN = 0.1  # seconds, or one step
ROUNDS = 3, 40  # at least, at most
WARM_UP = 3  # steps
STEPS = 12, 60  # steps whose losses are compared: at least, at most
_BEYOND = 1.3  # a step takes this many times as long while it is examined
_OF_EXAMINING = 0.6  # share of the time
_SPARE = 0.8  # share of the free memory that is used at once
_OF_A_PROCESS = 600 << 20  # bytes of a CUDA context, per process


def tune(
    factory: Callable[[], Any] | str,
    *,
    seconds: float = 100.0,
    steps: int | None = None,
    levels: Sequence[str] = LEVELS,
    float16: bool | None = None,
) -> Tuning:
    """Train a model at every level and compare: time, memory, losses; and say which level to take, and why.

    ``factory()`` returns ``(model, optimizer, batches, loss_fn)``. ``model`` is in float32, on its device. ``batches`` gives pairs
    (inputs, targets) as a DataLoader does, of which the first 32 are used in turn, and the loss is
    ``loss_fn(model(inputs), targets)``. A tuple of inputs becomes several arguments, a dict keyword arguments.

    >>> print(ampkit.tune(factory))
    >>> ampkit.tune(factory, seconds=60).to_json("tuning.json")

    Compared are float32, torch.autocast (with a GradScaler in float16), and the ``levels`` in float16 and bfloat16, each with the
    factory's optimizer. Where that is ``torch.optim.SGD``, ``Adam`` or ``AdamW``, ampkit's fused one and its moments in 8 bits are
    added. On a CPU ``float16`` is left out unless it is True; False leaves it out everywhere. A way that fails says why in its row.

    The run takes about ``seconds``. ``steps`` are compared by their losses; by default as many as there is time for, 12 to 60.

    Every way trains in a process of its own, which imports the factory: it must be a function at the top level of a file or module,
    or a name, ``"script.py:factory"`` or ``"package.module:factory"``. A script that calls `tune` does so under
    ``if __name__ == "__main__":``.

    Raises TypeError for what is no factory, ValueError for one that cannot be imported and for settings that make no sense,
    FileNotFoundError for a script that is not there, and RuntimeError where the factory fails, or float32.
    """
    if os.environ.get(_IS_CHILD):
        raise RuntimeError(
            "tune() was called while its own processes import the script. Put the call under if __name__ == '__main__':"
        )
    if unknown := [level for level in levels if level not in LEVELS]:
        raise ValueError(f"tune: levels={unknown} are not accepted: expected some of {', '.join(LEVELS)}.")
    if seconds < 1 or (steps is not None and steps < 1):
        raise ValueError(f"tune: seconds={seconds}, steps={steps}; expected at least 1.")
    place = located(factory)
    threads = torch.get_num_threads()
    with PatchSet() as patches:
        for name in ("__file__", "__spec__"):  # else multiprocessing imports this script
            patches.set(sys.modules["__main__"], name, None)
        # A new process: the state of torch, the environment and the threads of this one do not affect the measurements.
        worker = Worker(multiprocessing.get_context("spawn"), Measurements, place, threads, environment=_ENVIRONMENT)
    script = f"{os.path.basename(place[0])} (its top level runs, except under if __name__ == '__main__':)"
    told = f"importing {script}, then training in every way, about {seconds:g} s"
    print(f"ampkit tune: {told}", file=sys.stderr, flush=True)
    try:
        compared: Tuning = worker.ask("measure", list(levels), float16, seconds, steps)
        return compared
    except WorkerError as error:
        if str(error).startswith("NoFactory: "):
            raise ValueError(f"tune: {str(error).partition(': ')[2]}") from None
        failed = RuntimeError(f"tune: float32 training failed: {error}")
        failed.add_note(error.details)
        raise failed from None
    finally:
        worker.stop()


class Measurements:
    """The measurements of all ways: a worker for each, in a process that has computed nothing before.

    First each way is examined for memory and losses. Then all workers live at once and take turns in changing order, so that
    another job on the machine disturbs all alike. Ways that do not fit into memory together take their turns alone.
    """

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


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tune`."""
    parser.add_argument("factory", metavar="SCRIPT:FACTORY", help="script.py:factory or package.module:factory")
    parser.add_argument("--seconds", type=float, default=100.0, help="about how long it may take (100)")
    parser.add_argument("--steps", type=int, metavar="N", help="compare the losses of N steps (12 to 60, by the time)")
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=LEVELS, help="only these levels")
    parser.add_argument("--float16", action="store_true", default=None, help="try float16 on a CPU too, which is slow")
    parser.add_argument("--json", metavar="FILE", help="write all figures")


def from_command_line(arguments: argparse.Namespace) -> int:
    """Print the table. The exit code is 1 if the factory or float32 training fails, 2 for a mistake on the command line."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        settings = {name: getattr(arguments, name) for name in ("factory", "seconds", "steps", "levels", "float16")}
        tuning = tune(**settings)
    except (ValueError, FileNotFoundError) as error:  # also for a name of no factory
        print(f"ampkit {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print("\n".join([*getattr(error, "__notes__", []), f"ampkit {error}"]), file=sys.stderr)
        return 1
    print(tuning)
    if arguments.json:
        tuning.to_json(arguments.json)
    return 0
