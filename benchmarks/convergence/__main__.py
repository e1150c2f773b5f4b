"""Whether training in lower precision ends where float32 ends, on data that people know.

    python benchmarks/convergence TASK [--only NAME ...] [--stage NAME] [--seeds N] [--steps N] [--results FOLDER]

TASK is bible, mnist1d, mnist or verses; each module says what it learns and which packages it needs. Data and weights come
inside of those packages, and nothing is downloaded. A run is kept in FOLDER (default: convergence-results) and not done again, so
that a command which was stopped goes on. It ends with a table: the value in the mean over the seeds with its standard deviation,
and the distance from float32 at the same seed, mean and standard deviation.
"""

import argparse
import importlib
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from resumable import Results

TASKS = {"bible": "bible", "mnist1d": "mnist1d_", "mnist": "mnist", "verses": "verses"}
CURVE = 20  # points that are kept of a curve of losses, each a mean


def curve(losses):
    size = max(1, len(losses) // CURVE)
    return [round(statistics.mean(losses[i : i + size]), 5) for i in range(0, len(losses) - size + 1, size)]


def table(name, task, args):
    """The rows of a task, printed as they are known."""
    folder = Path(args.results)
    folder.mkdir(parents=True, exist_ok=True)
    known, steps = Results(folder / f"{name}.jsonl"), args.steps or task.STEPS

    def value(stage, precision, seed):
        def run():
            losses, value = task.train(precision, seed, stage, steps, folder)
            return {"value": value, "curve": curve(losses), "torch": torch.__version__}

        return known.get((stage, precision, seed, steps), run)["value"]

    print(f"| {name} | precision | {task.VALUE} | from float32 | seeds |\n|---|---|---|---|---|")
    for stage in args.stage or task.STAGES:
        first = None
        for precision in args.only or task.PRECISIONS_OF:
            values = [value(stage, precision, seed) for seed in range(args.seeds or task.SEEDS)]
            first = first or values
            print(f"| {stage} | {precision} | {row(values, first)} | {len(values)} |", flush=True)


def row(values, first):
    """``mean +- deviation | mean +- deviation of the distances``."""
    return f"{spread(values)} | {spread([a - b for a, b in zip(values, first)], '+')}"


def spread(values, sign=""):
    deviation = f" ± {statistics.stdev(values):.3g}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.4g}{deviation}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="precisions; float32 first")
    parser.add_argument("--stage", nargs="+", help="stages or models of the task")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--results", default="convergence-results")
    args = parser.parse_args()
    task = importlib.import_module(TASKS[args.task])
    table(args.task, task, args)


if __name__ == "__main__":
    main()
