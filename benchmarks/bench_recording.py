"""The time and peak memory that `ampkit.recording` adds to iterations of the GPT.

    python benchmarks/bench_recording.py

Iterations with and without take turns, and ratios are medians of neighbours'. Seconds are CPU time of the process, which others
that run beside it disturb less. Peak memory is resident memory above what the imports take, of processes that give back what they
free.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time

import cases
import torch
import ways
from bench import GIVE_BACK, resident

import ampkit

WAYS = ("float32", "autocast", "O1", "O2", "O5, fused")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="of three iterations each")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=WAYS, action="append")
    parser.add_argument("--short", action="store_true", help="a small model, to see that all runs")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.peak:
        return print(peak(*args.peak, args.short))
    print(f"GPT, {args.rounds} rounds of 3 iterations, {args.threads} threads, torch {torch.__version__}")
    print(f"{'':12}{'plain':>10}{'recording':>12}{'ratio':>8}{'peak':>8}")
    for name in args.only or WAYS:
        plain, recorded = measure(name, args.rounds, args.short)
        ratio = statistics.median(one / other for one, other in zip(recorded, plain))
        held = [run_for_peak(name, what, args) for what in ("plain", "recording")]
        milliseconds = [1e3 * statistics.median(times) / 3 for times in (plain, recorded)]
        print(
            f"{name:12}{milliseconds[0]:8.1f}ms{milliseconds[1]:10.1f}ms{ratio:8.3f}{held[1] / held[0]:8.3f}",
            flush=True,
        )


def measure(name, rounds, short):
    """Seconds of three iterations, plain and recorded."""
    case = cases.make("gpt", short=short)
    way = ways.make(name, case, torch.bfloat16)
    times = [], []
    train(case, way)
    for _ in range(rounds):
        times[0].append(train(case, way))
        with ampkit.recording():
            times[1].append(train(case, way))
    ampkit.close()
    return times


def train(case, way):
    start = time.process_time()
    for _ in range(3):
        case.step(way, lambda phase: None)
    return time.process_time() - start


def run_for_peak(name, mode, args):
    command = [sys.executable, __file__, "--peak", name, mode, "--threads", str(args.threads)] + [
        "--short"
    ] * args.short
    done = subprocess.run(command, env={**os.environ, **GIVE_BACK}, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def peak(name, mode, short):
    """Bytes of peak resident memory above that after the imports, in two times three iterations; for a process of its own."""
    import ampkit.insight.record.recorder

    before = resident("VmRSS")
    case = cases.make("gpt", short=short)
    way = ways.make(name, case, torch.bfloat16)
    train(case, way)
    with ampkit.recording() if mode == "recording" else contextlib.nullcontext():
        train(case, way)
    return resident("VmHWM") - before


if __name__ == "__main__":
    main()
