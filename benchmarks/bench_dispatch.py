"""What a cast costs per call: O1's wrappers beside torch.autocast, on tensors so small that only overhead shows.

    python benchmarks/bench_dispatch.py

Weights are float32 and in the cast cache of both, activations are bfloat16, on the CPU. Repetitions of the contenders
are interleaved, so that another job on the machine disturbs all of them alike; figures are medians in microseconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ampkit.casting import Casting

REPETITIONS = 60
CALLS = 300


def main() -> None:
    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.rand(2, 2))
    kernel = torch.nn.Parameter(torch.rand(2, 2, 1, 1))
    x = torch.rand(2, 2).bfloat16()
    image = torch.rand(1, 2, 2, 2).bfloat16()
    low_weight, low_kernel = weight.bfloat16(), kernel.bfloat16()  # autograd records bare calls too
    cases = {
        "torch.mm": (lambda: torch.mm(x, weight), lambda: torch.mm(x, low_weight)),
        "F.linear": (lambda: F.linear(x, weight), lambda: F.linear(x, low_weight)),
        "F.conv2d": (lambda: F.conv2d(image, kernel), lambda: F.conv2d(image, low_kernel)),
        "x @ w": (lambda: x @ weight, lambda: x @ low_weight),
        "torch.cat": (lambda: torch.cat([x, x, x, x]), lambda: torch.cat([x, x, x, x])),
        "torch.relu": (lambda: torch.relu(x), lambda: torch.relu(x)),
    }
    print(f"torch {torch.__version__}, median of {REPETITIONS} x {CALLS} calls, microseconds")
    print(f"{'call':12}{'bare':>8}{'autocast':>10}{'ampkit':>8}{'over bare':>11}{'ratio':>8}")
    for name, (mixed, bare) in cases.items():
        plain, autocast, ours = measure(mixed, bare)
        print(f"{name:12}{plain:8.2f}{autocast:10.2f}{ours:8.2f}{ours - plain:11.2f}{ours / autocast:8.2f}")


def measure(mixed: Callable, bare: Callable) -> tuple[float, float, float]:
    """Median microseconds per call: bare in bfloat16, mixed under autocast, mixed under ampkit."""
    times: tuple[list, list, list] = ([], [], [])
    casting = Casting(torch.bfloat16, device_types=("cpu",))
    for _ in range(REPETITIONS):
        times[0].append(timed(bare))
        with torch.autocast("cpu", torch.bfloat16):
            times[1].append(timed(mixed))
        casting.install()
        times[2].append(timed(mixed))
        casting.close()
    bare_time, autocast, ours = (statistics.median(series) for series in times)
    return bare_time, autocast, ours


def timed(call: Callable) -> float:
    call()  # fills the cache of casts
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


if __name__ == "__main__":
    main()
