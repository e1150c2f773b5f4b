"""Why sizes are multiples of 8: the time of a product and of a convolution in lower precision, for sizes around 64 and 256.

$ python multiples_of_8.py

On a GPU times are the clock's, on a CPU the CPU time of one thread; each is the least of many, the sizes taking turns.
"""

import argparse
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

ON_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_CUDA else "cpu")
LOWER_PRECISION = torch.float16 if ON_CUDA else torch.bfloat16
CHANNELS = (60, 63, 64, 65, 68, 72)  # products have four times as many, and 63 gives 252


def linear(batch: int, width: int, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    x, w = (torch.randn(rows, width, device=DEVICE, dtype=dtype) for rows in (batch, width))
    return lambda: F.linear(x, w)


def convolution(channels: int, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    x = torch.randn(8, channels, 16, 16, device=DEVICE, dtype=dtype)
    w = torch.randn(channels, channels, 3, 3, device=DEVICE, dtype=dtype)
    return lambda: F.conv2d(x, w, padding=1)


def least_times(works: Sequence[Callable], rounds: int) -> list[float]:
    """Return the least seconds of each work."""
    clock = time.perf_counter if ON_CUDA else time.process_time
    best = [float("inf")] * len(works)
    for _ in range(rounds):
        for index, work in enumerate(works):
            start = clock()
            for _ in range(10):
                work()
            if ON_CUDA:
                torch.cuda.synchronize()
            best[index] = min(best[index], (clock() - start) / 10)
    return best


def rows(rounds: int) -> list[tuple[int, float, float]]:
    """(channels, time of a convolution, time of a product of that width), times per multiplication, relative to 64's."""
    torch.set_num_threads(1)
    convolutions = least_times([convolution(size, LOWER_PRECISION) for size in CHANNELS], rounds)
    products = least_times([linear(512, 4 * size, LOWER_PRECISION) for size in CHANNELS], rounds)
    per_work = [[seconds / size**2 for seconds, size in zip(times, CHANNELS)] for times in (convolutions, products)]
    base = [times[CHANNELS.index(64)] for times in per_work]
    return [(size, per_work[0][i] / base[0], per_work[1][i] / base[1]) for i, size in enumerate(CHANNELS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    print(f"time per multiplication, relative to 64 channels, in {str(LOWER_PRECISION).removeprefix('torch.')}")
    print(f"{'channels':>8}{'convolution':>14}{'product, 4 x as wide':>24}")
    for size, convolved, multiplied in rows(args.rounds):
        print(f"{size:>8}{convolved:>13.2f}x{multiplied:>23.2f}x")


if __name__ == "__main__":
    main()
