"""Whole training steps: float32, torch.autocast with GradScaler, and ampkit's levels, with torch's optimizers and with fused ones.

    make bench                      within 25 minutes, on the CPU; make bench BENCH=--all for every cell, without a limit
    python benchmarks/bench.py --short --only gpt --only gpt,compiled
    python benchmarks/bench.py --device cuda --only gpt2 --only resnet50

A cell is a model, eager or compiled, and a number of micro-batches. In each cell every way of training has a process of its own,
since O1 patches torch for the whole process, and these take turns in changing order, so that another job on the machine
disturbs all alike; ratios are of turns of the same round. A turn is one step, or as many as fit into a tenth of a second. All
keep the memory that they free. Peak memory is that of another process for each, which gives back what it frees. What is found
goes to benchmarks/results/<date>-<processor>.json, and docs/make_benchmarks.py makes a page of it.
"""

import argparse
import contextlib
import datetime
import itertools
import json
import multiprocessing
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

from ampkit.insight.processes import KEEP_FREED, Worker

ROOT = Path(__file__).resolve().parents[1]
FEWER = ["float32", "autocast", "O1, fused", "O2, fused", "O5, fused"]  # where cells take long
WARM_UP = 10  # steps, the loss of whose last is noted
TURN = 0.1  # seconds
ROUNDS = 5, 40  # at least, at most
STEPS_FOR_MEMORY = 3
#: An environment for glibc in which freed memory is returned: kept memory hides the peak of a process.
GIVE_BACK = {"MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536"}


class Cell:
    """A model, the number of micro-batches in a step, whether it is compiled, and the ways of training."""

    def __init__(self, model, accumulate=1, compiled=False, ways=None):
        self.model, self.accumulate, self.compiled = model, accumulate, compiled
        self.ways = list(ways or FEWER)

    @classmethod
    def parse(cls, text):
        """'gpt', 'gpt,4' or 'gpt,compiled'."""
        model, *rest = text.split(",")
        numbers = [int(one) for one in rest if one.isdigit()]
        return cls(model, *numbers, compiled="compiled" in rest)

    def __str__(self):
        return ",".join([self.model, *[str(self.accumulate)] * (self.accumulate > 1), *["compiled"] * self.compiled])


class Trainer:
    """A way of training a case, with the methods that its process answers to."""

    def __init__(self, way, cell, options):
        import cases
        import torch
        import ways

        self.cell, self.device = cell, torch.device(options["device"])
        if self.device.type == "cpu":
            torch.set_num_threads(options["threads"])
        if cell.model == "lstm" and (cell.compiled or not torch.ops.mkldnn._is_mkldnn_bf16_supported()):
            # No graph can hold oneDNN's LSTM, and torch.autocast asks for it in bfloat16 where there is none, and raises.
            torch.backends.mkldnn.set_flags(False)
        self.case = cases.make(cell.model, cell.accumulate, options["short"])
        self.case.to(self.device)
        self.way = ways.make(way, self.case, getattr(torch, options["dtype"]))
        if cell.compiled:
            torch._dynamo.config.allow_rnn = True
            self.way.compile()

    def about(self):
        import cases

        parameters = sum(p.numel() for model in self.way.models for p in model.parameters())
        return {
            "name": {**cases.NAMES, **cases.LARGE}[self.cell.model],
            "about": self.case.about,
            "optimizer": self.case.optimizer,
            "parameters": parameters,
        }

    def train(self, steps):
        """Train for so many steps; return the loss of the last."""
        for _ in range(steps):
            loss = self.case.step(self.way, lambda phase: None)
        return float(loss)

    def turn(self, steps):
        """Mean seconds of a step, and of each phase of it, over so many steps."""
        clock = Clock(self.device)
        start = time.perf_counter()
        for _ in range(steps):
            self.case.step(self.way, clock.mark)
        clock.synchronize()
        total = time.perf_counter() - start
        return {phase: seconds / steps for phase, seconds in {"total": total, **clock.phases()}.items()}

    def saved_bytes(self):
        from memory import saved_bytes

        return saved_bytes(lambda: self.train(1), self.way.models)

    def host_reads(self):
        from host_reads import count_reads

        return count_reads(lambda: self.case.step(self.way, lambda phase: None), self.device)


class Clock:
    """A clock that adds up the time between marks, by name: the host's on a CPU, the device's on a GPU, without waiting for it."""

    def __init__(self, device):
        import torch

        self.cuda = torch.cuda if device.type == "cuda" else None
        self.marks = []
        self.synchronize()
        self.mark(None)

    def synchronize(self):
        if self.cuda is not None:
            self.cuda.synchronize()

    def mark(self, phase):
        now = time.perf_counter()
        if self.cuda is not None:
            now = self.cuda.Event(enable_timing=True)
            now.record()
        self.marks.append((phase, now))

    def phases(self):
        found = {"forward": 0.0, "backward": 0.0, "step": 0.0}
        for (_, before), (phase, after) in itertools.pairwise(self.marks):
            found[phase] += after - before if self.cuda is None else before.elapsed_time(after) / 1e3
        return found


class Holder:
    """The most bytes that a way of training holds, measured in another process."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def peak_bytes(self):
        import torch

        way, cell, options = self.arguments
        on_cpu = options["device"] == "cpu"
        before = resident("VmRSS") if on_cpu else 0
        Trainer(way, cell, options).train(STEPS_FOR_MEMORY)
        if not on_cpu:
            return torch.cuda.max_memory_allocated()
        return resident("VmHWM") - before


def resident(which):
    """Bytes of this process's resident memory: now (VmRSS), or at most (VmHWM)."""
    return 1024 * int(re.findall(rf"{which}:\s*(\d+) kB", Path("/proc/self/status").read_text())[0])


class Processes:
    """Processes started from one that has imported torch and computed nothing; ``environment`` is set from their start."""

    def __init__(self, environment):
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch", "torch._dynamo", "torchvision", "ampkit", "ampkit.optimizers"])
        os.environ.update(environment)

    def start(self, make, *arguments):
        return Worker(self.context, make, *arguments)


def measure(processes, cell, options, until):
    """Measure everything about a cell; its turns go on until that time."""
    with contextlib.ExitStack() as stack:
        workers = {}
        for way in cell.ways:
            workers[way] = processes.start(Trainer, way, cell, options)
            stack.callback(workers[way].stop)
        return measured(cell, options, until, lambda way, *task: workers[way].ask(*task))


def measured(cell, options, until, ask):
    """Measure a cell, by ``ask(way, method, *arguments)``."""
    warm_up = 2 if options["short"] else WARM_UP
    by_way = {way: {"loss": ask(way, "train", warm_up)} for way in cell.ways}
    for way, figures in by_way.items():
        figures["saved_bytes"] = ask(way, "saved_bytes")
        figures["host_reads"] = None if cell.compiled else ask(way, "host_reads")
        figures["seconds"], figures["phases"] = [], {"forward": [], "backward": [], "step": []}
    steps = max(1, int(TURN / min(ask(way, "turn", 1)["total"] for way in cell.ways)))
    least, most = (2, 2) if options["short"] else ROUNDS
    rounds = 0
    while rounds < least or (rounds < most and time.monotonic() < until):
        first = rounds % len(cell.ways)
        order = cell.ways[first:] + cell.ways[:first]
        for way in order if rounds % 2 else order[::-1]:
            turn = ask(way, "turn", 1 if options["short"] else steps)
            by_way[way]["seconds"].append(turn.pop("total"))
            for phase, seconds in turn.items():
                by_way[way]["phases"][phase].append(seconds)
        rounds += 1
    about = ask(cell.ways[0], "about")
    for figures in by_way.values():
        figures["seconds"] = [round(seconds, 7) for seconds in figures["seconds"]]
        figures["phases"] = {phase: round(statistics.median(values), 7) for phase, values in figures["phases"].items()}
    return {
        "model": cell.model,
        "accumulate": cell.accumulate,
        "compiled": cell.compiled,
        **about,
        "warm_up": warm_up,
        "ways": by_way,
    }


class Peaks:
    """Peak memory, asked of another process, since a process decides at its start whether it gives back freed memory."""

    def __init__(self):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        self.process = subprocess.Popen([sys.executable, __file__, "--peaks"], env={**os.environ, **GIVE_BACK}, **pipes)

    def of(self, cell, options):
        """The most bytes that each way of training holds; of eager cells only, since compilers hold memory of their own."""
        if cell.compiled:
            return dict.fromkeys(cell.ways)
        print(json.dumps([str(cell), cell.ways, options]), file=self.process.stdin)
        return json.loads(self.process.stdout.readline())


def answer_with_peaks():
    processes = Processes(GIVE_BACK)
    for line in sys.stdin:
        (name, ways, options), peaks = json.loads(line), {}
        for way in ways:
            worker = processes.start(Holder, way, Cell.parse(name), options)
            peaks[way] = worker.ask("peak_bytes")
            worker.stop()
        print(json.dumps(peaks), flush=True)


def here(options):
    """The machine, the versions and the options of this measurement."""
    import torch

    import ampkit

    device = torch.device(options["device"])
    if device.type == "cuda":
        processor = torch.cuda.get_device_name()
    else:
        names = re.findall(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        processor = names[0] if names else platform.processor()
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return {
        "date": str(datetime.date.today()),
        "processor": processor,
        "cores": os.cpu_count(),
        "bfloat16_instructions": bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) if device.type == "cpu" else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ampkit": ampkit.__version__,
        "kernels": str(ampkit.kernels.implementation()),
        "commit": commit.stdout.strip() or "unknown",
        "set_grad_none": True,  # of FusedSGD, in ways.py; older results lack it
        **options,
    }


def cells_of(args):
    import cases
    import ways

    every = args.ways.split(";") if args.ways else list(ways.WAYS)
    if args.only:
        named = map(Cell.parse, args.only)
        return [
            Cell(one.model, one.accumulate, one.compiled, FEWER if one.compiled and not args.ways else every)
            for one in named
        ]
    if args.all:
        several = [(name, count) for name in cases.NAMES for count in (1, 4, 8) if count == 1 or name != "dcgan"]
        return [Cell(name, count, compiled, every) for compiled in (False, True) for name, count in several]
    eager = [Cell(name, ways=every) for name in cases.NAMES]
    return (
        eager
        + [Cell(name, count) for name in ("gpt", "resnet18") for count in (4, 8)]
        + [Cell(name, compiled=True) for name in ("gpt", "resnet18")]
    )


def described(cell, result):
    """Yield a line for the cell, and a line for each way of training."""
    yield f"{cell}: {result['about']}, {result['optimizer']}, {len(result['ways']['autocast']['seconds'])} rounds"
    autocast = result["ways"]["autocast"]["seconds"]
    for way, figures in result["ways"].items():
        low, ratio, high = statistics.quantiles(
            [a / b for a, b in zip(figures["seconds"], autocast, strict=True)], n=4, method="inclusive"
        )
        milliseconds = statistics.median(figures["seconds"]) * 1e3
        phases = " ".join(f"{seconds * 1e3:9.2f}" for seconds in figures["phases"].values())
        peak = "-" if figures["peak_bytes"] is None else f"{figures['peak_bytes'] / 2**20:.1f}"
        reads = "-" if figures["host_reads"] is None else figures["host_reads"]
        yield (
            f"  {way:<10}{milliseconds:9.2f} ms, {ratio:.3f} ({low:.3f}-{high:.3f}) of autocast, phases {phases}, peak {peak} "
            f"MiB, saved {figures['saved_bytes'] / 1e6:.2f} MB, host reads {reads}, loss {figures['loss']:.4f}"
        )


def as_text(results):
    """JSON, with each list of numbers on a line."""
    return re.sub(r"\[[-\d.e,\s]+\]", lambda match: " ".join(match[0].split()), json.dumps(results, indent=1)) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--minutes",
        type=float,
        default=20.0,
        help="for all cells together; a cell that compiles may take longer (default: %(default)s)",
    )
    parser.add_argument("--all", action="store_true", help="every cell, with all rounds, however long it takes")
    parser.add_argument(
        "--only", action="append", help="a cell: gpt, gpt,4 or gpt,compiled; may be given several times"
    )
    parser.add_argument("--ways", default="", help="with --only: some ways of training, as 'autocast;O1;O5, fused'")
    parser.add_argument("--short", action="store_true", help="small models, two rounds: to see that it runs")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument(
        "--out", type=Path, help="where the JSON goes; nowhere with --only or --short, unless it is named"
    )
    parser.add_argument("--peaks", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peaks:
        return answer_with_peaks()
    started = time.monotonic()
    processes, memory = Processes(KEEP_FREED), Peaks()
    import torch

    options = {
        "device": args.device,
        "dtype": args.dtype,
        "short": args.short,
        "threads": torch.get_num_threads(),
    }
    place = here(options)
    print(f"{place['processor']}, torch {place['torch']}, {args.dtype}, {options['threads']} threads", flush=True)
    left = [(cell, 2.0 if cell.compiled else 1.0) for cell in cells_of(args)]
    name = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\(.*?\)|Processor|CPU", " ", place["processor"]).lower()).strip("-")
    out = args.out
    if out is None and not (args.only or args.short):
        out = ROOT / "benchmarks" / "results" / f"{place['date']}-{name}.json"
        if place["commit"].endswith("-dirty"):
            parser.error("the checkout has changes without a commit; commit them, or name a file with --out")
    results = {**place, "minutes": 0.0, "cells": []}
    while left:
        cell, weight = left[0]
        now = time.monotonic()
        share = (started + 60 * args.minutes - now) * weight / sum(weight for _, weight in left)
        peak = memory.of(cell, options)
        result = measure(processes, cell, options, float("inf") if args.all else now + share)
        for way, figures in result["ways"].items():
            figures["peak_bytes"] = peak[way]
        results["cells"].append(result)
        print("\n".join(described(cell, result)), flush=True)
        print(f"  {time.monotonic() - now:.0f} s of {share:.0f}", flush=True)
        results["minutes"] = round((time.monotonic() - started) / 60, 1)
        if out is not None:
            out.write_text(as_text(results))
        left.pop(0)
    if out is not None:
        print(f"{out}: written in {results['minutes']} minutes")


if __name__ == "__main__":
    main()
