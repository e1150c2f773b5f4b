"""`tune`, and ``ampkit tune``: train the model of a factory in every way that the device supports, side by side.

The measurements run in other processes (measuring.py), so that this process, its environment and its torch stay unchanged.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...patching import PatchSet
from ..processes import KEEP_FREED, Worker, WorkerError
from .measuring import Measurements
from .report import Tuning
from .trainer import located
from .ways import LEVELS

EXAMPLE = "ampkit tune examples/tuning/models.py:lstm --levels O2 --seconds 2"
_IS_CHILD = "AMPKIT_TUNING"
_ENVIRONMENT = {**KEEP_FREED, _IS_CHILD: "1"}


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
        settings = {name: getattr(arguments, name) for name in ("seconds", "steps", "levels", "float16")}
        tuning = tune(arguments.factory, **settings)
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
