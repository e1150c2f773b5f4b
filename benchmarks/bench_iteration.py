"""The cost of an iteration for the host besides forward and backward: scale_loss entered and left, and the step.

    python benchmarks/bench_iteration.py [--parameters 8 60 160] [--repetitions 40] [--device cuda]

Each model is so many 16 x 16 weights, of which the loss reads one number; their gradients are put in place by hand, so that
nothing but the host's work shows. The contenders are O1 with torch's fused AdamW, O2 and O5 with FusedAdam, and torch's
GradScaler with its fused AdamW. All but O5 have a dynamic loss scale. They take turns; times are medians in microseconds,
ratios medians of the ratios of neighbouring repetitions.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import ampkit
from ampkit.optimizers import FusedAdam

ITERATIONS = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, nargs="+", default=[8, 60, 160])
    parser.add_argument("--repetitions", type=int, default=40)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {chosen.device}: microseconds an iteration, {chosen.repetitions} x {ITERATIONS}")
    levels = ("O1", "O2", "O5")
    print(f"{'parameters':>10} {'GradScaler':>11}", *(f"{name:>8} {'ratio':>6}" for name in levels))
    for count in chosen.parameters:
        times = measure(contenders(count, chosen.device), chosen.repetitions)
        base = times["GradScaler"]
        print(f"{count:10} {statistics.median(base) * 1e6:11.0f}", end="")
        for name in levels:
            ratio = statistics.median(a / b for a, b in zip(times[name], base))
            print(f" {statistics.median(times[name]) * 1e6:8.0f} {ratio:6.2f}", end="")
        print()


class Weights(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(16, 16) for _ in range(count))

    def forward(self) -> None:
        raise NotImplementedError


def contenders(count: int, device: str) -> dict[str, Callable[[], Callable[[], None]]]:
    """Makers of each contender's iteration, by name: called one after the other, so that no session sees another's optimizer."""
    return {
        "GradScaler": lambda: with_grad_scaler(count, device),
        "O1": lambda: with_ampkit(count, device, "O1", lambda params: torch.optim.AdamW(params, fused=True)),
        "O2": lambda: with_ampkit(count, device, "O2", FusedAdam),
        "O5": lambda: with_ampkit(count, device, "O5", FusedAdam, loss_scale=1.0),
    }


def with_grad_scaler(count: int, device: str) -> Callable[[], None]:
    model = Weights(count).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler(device)
    put = gradients_of(model)
    weight = next(model.parameters())

    def iteration() -> None:
        scaler.scale(weight[0, 0].clone()).backward()
        put()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return iteration


def with_ampkit(
    count: int, device: str, level: str, make: Callable, loss_scale: float | str = "dynamic"
) -> Callable[[], None]:
    model = Weights(count).to(device)
    optimizer = make(model.parameters())
    ampkit.initialize(model, optimizer, opt_level=level, loss_scale=loss_scale, verbosity=0)
    put = gradients_of(model)
    weight = next(model.parameters())
    keep_alive = model

    def iteration(keep_alive: nn.Module = keep_alive) -> None:
        with ampkit.scale_loss(weight[0, 0].clone(), optimizer) as scaled_loss:
            scaled_loss.backward()
            put()
        optimizer.step()
        optimizer.zero_grad()

    return iteration


def gradients_of(model: nn.Module) -> Callable[[], None]:
    pairs = [(param, torch.full_like(param, 0.5, requires_grad=False)) for param in model.parameters()]

    def put() -> None:
        for param, gradient in pairs:
            param.grad = gradient

    return put


def measure(iterations: dict[str, Callable[[], Callable[[], None]]], repetitions: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in iterations}
    for _ in range(repetitions):
        for name, make in iterations.items():
            iteration = make()
            for _ in range(5):
                iteration()
            start = time.perf_counter()
            for _ in range(ITERATIONS):
                iteration()
            times[name].append((time.perf_counter() - start) / ITERATIONS)
            ampkit.close()
    return times


if __name__ == "__main__":
    main()
