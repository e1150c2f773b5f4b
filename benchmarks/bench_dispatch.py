"""The cost of a cast per call: O1's wrappers beside torch.autocast, on tensors so small that only overhead shows.

    python benchmarks/bench_dispatch.py [--device cuda] [--dtype float16] [--repetitions 60]

Weights are float32 and in the cast cache of both, activations are in lower precision. The contenders take turns, so that
another job on the machine disturbs all of them alike. Times are medians in microseconds; a ratio is the median of the
ratios of neighbouring repetitions, and what follows it is the range of their middle half.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F

from ampkit.casting.cpp_wrappers import library, why
from ampkit.casting.engine import Casting

CALLS = 400
UNPATCHED = "torch.relu"

Calls = dict[str, Callable]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--repetitions", type=int, default=60)
    chosen = parser.parse_args()
    if chosen.repetitions < 2:
        parser.error(f"--repetitions is {chosen.repetitions}; quartiles take two or more")
    torch.set_num_threads(1)
    device, dtype = chosen.device, getattr(torch, chosen.dtype)

    mixed, bare = calls(device, dtype)
    contenders = {
        "bare": (bare, nullcontext),
        "autocast": (mixed, lambda: torch.autocast(device, dtype)),
        "Python": (mixed, lambda: patched(device, dtype, in_python=True)),
    }
    if library is not None:
        contenders["C++"] = (mixed, lambda: patched(device, dtype, in_python=False))
    times = measure(contenders, chosen.repetitions)

    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {where}, {chosen.dtype}: medians of {chosen.repetitions} x {CALLS} calls, in us")
    print(f"wrappers in C++: {why}")
    report(times)


def calls(device: str, dtype: torch.dtype) -> tuple[Calls, Calls]:
    """The calls as a model makes them, and the same on tensors that need no cast."""
    weight = torch.nn.Parameter(torch.rand(2, 2, device=device))
    kernel = torch.nn.Parameter(torch.rand(2, 2, 1, 1, device=device))
    x = torch.rand(2, 2, device=device).to(dtype)
    image = torch.rand(1, 2, 2, 2, device=device).to(dtype)

    def all_of(w: torch.Tensor, k: torch.Tensor) -> Calls:
        return {
            "torch.mm": lambda: torch.mm(x, w),
            "F.linear": lambda: F.linear(x, w),
            "F.conv2d": lambda: F.conv2d(image, k),
            "x @ w": lambda: x @ w,
            "torch.cat": lambda: torch.cat([x, x, x, x]),
            UNPATCHED: lambda: torch.relu(x),
        }

    return all_of(weight, kernel), all_of(weight.to(dtype), kernel.to(dtype))  # autograd records the bare calls too


@contextmanager
def patched(device: str, dtype: torch.dtype, in_python: bool) -> Iterator[None]:
    casting = Casting(dtype, device_types=(device,), in_python=in_python)
    casting.install()
    try:
        with casting.caches.call():  # inside of a model's forward, to whose end casts are kept
            yield
    finally:
        casting.close()


def measure(contenders: dict, repetitions: int) -> dict[str, dict[str, list[float]]]:
    """Microseconds per call, by contender and call, one figure for each repetition."""
    times = {name: {call: [] for call in mixed} for name, (mixed, _) in contenders.items()}
    for repetition in range(repetitions + 1):
        for name, (functions, context) in contenders.items():
            with context():
                for call, function in functions.items():
                    figure = timed(function)
                    if repetition > 0:  # the first warms up
                        times[name][call].append(figure)
    return times


def timed(call: Callable) -> float:
    for _ in range(10):
        call()  # fills the cache of casts
    synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    elapsed = time.perf_counter() - start
    synchronize()
    return elapsed / CALLS * 1e6


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def report(times: dict[str, dict[str, list[float]]]) -> None:
    wrappers = [name for name in ("C++", "Python") if name in times]
    titles = "".join(f"{name:>8}{'over bare':>11}{'ratio to autocast':>24}" for name in wrappers)
    print(f"{'call':12}{'bare':>8}{'autocast':>10}{titles}")
    ratios = {name: [] for name in wrappers}
    for call in times["bare"]:
        bare, autocast = (statistics.median(times[name][call]) for name in ("bare", "autocast"))
        line = f"{call:12}{bare:8.2f}{autocast:10.2f}"
        for name in wrappers:
            median = statistics.median(times[name][call])
            low, ratio, high = statistics.quantiles(
                [mine / theirs for mine, theirs in zip(times[name][call], times["autocast"][call])], n=4
            )
            line += f"{median:8.2f}{median - bare:11.2f}{ratio:10.3f} ({low:.3f}-{high:.3f})"
            if call != UNPATCHED:
                ratios[name].append(ratio)
        print(line)
    for name in wrappers:
        mean = math.exp(statistics.fmean(map(math.log, ratios[name])))
        print(
            f"{name}: geometric mean of the ratios {mean:.3f}, largest {max(ratios[name]):.3f} ({UNPATCHED} left out)"
        )


if __name__ == "__main__":
    main()
