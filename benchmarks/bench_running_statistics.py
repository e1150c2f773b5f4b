"""The cost of keeping running statistics finite: ResNet-50's buffers, as part of a training step at O2.

    python benchmarks/bench_running_statistics.py [--rounds 20] [--batch 8] [--size 224] [--device cpu] [--dtype bfloat16]

Twice in each iteration, before the forward and at the end of the block, elements are chosen from the buffers or from a copy
of their last finite values, on the device; on the CPU, where the host can look, all are copied alone. Each is timed alone,
waiting for the device before and after, so that on CUDA the sum is an upper bound of what a step takes longer. "launches"
counts the operations that torch dispatches. Figures are medians.
"""

import argparse
import statistics
import time

import torch
import torchvision
from memory import keep_freed_memory
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ampkit
from ampkit.iteration.running_statistics import RunningStatistics
from ampkit.optimizers import FusedSGD

WARM_UP = 2


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224, help="pixels in each direction (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", help="lower precision (default: %(default)s)")
    args = parser.parse_args()
    keep_freed_memory()

    model = torchvision.models.resnet50().to(args.device)
    model, optimizer = ampkit.initialize(
        model,
        FusedSGD(model.parameters(), lr=0.01, momentum=0.9),
        opt_level="O2",
        cast_model_type=getattr(torch, args.dtype),
        loss_scale="dynamic",
        verbosity=0,
    )
    images = torch.randn(args.batch, 3, args.size, args.size, device=args.device)
    labels = torch.randint(1000, (args.batch,), device=args.device)

    def step():
        optimizer.zero_grad()
        with ampkit.scale_loss(F.cross_entropy(model(images), labels), optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    running = RunningStatistics()
    running.add(model)

    def before():
        running.before_forward(model)

    parts = {"before": before, "after": running.keep_finite}
    seconds = {"step": [], **{name: [] for name in parts}}
    for index in range(WARM_UP + args.rounds):
        for name, action in (("step", step), *parts.items()):
            taken = timed(action, args.device)
            if index >= WARM_UP:
                seconds[name].append(taken)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    buffers = list(model.buffers())
    print(
        f"ResNet-50, batch {args.batch} of {args.size} x {args.size} on {args.device}: {len(buffers)} buffers, ", end=""
    )
    print(f"{sum(buffer.nbytes for buffer in buffers) / 1e6:.2f} MB")
    print(f"{'part':<8}{'ms':>10}{'of a step':>12}{'launches':>10}")
    for name, action in parts.items():
        print(f"{name:<8}{medians[name] * 1e3:>10.3f}{medians[name] / medians['step']:>12.2%}{launches(action):>10}")
    both = medians["before"] + medians["after"]
    print(f"{'both':<8}{both * 1e3:>10.3f}{both / medians['step']:>12.2%}")
    print(f"{'step':<8}{medians['step'] * 1e3:>10.3f}")


def timed(action, device):
    wait(device)
    start = time.perf_counter()
    action()
    wait(device)
    return time.perf_counter() - start


def wait(device):
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def launches(action):
    """The number of operations that the action dispatches, without views, which compute nothing."""
    counted = []

    class Counts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if not func.is_view:
                counted.append(func)
            return func(*args, **(kwargs or {}))

    with Counts():
        action()
    return len(counted)


if __name__ == "__main__":
    main()
