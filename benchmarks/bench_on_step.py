"""The time that `ampkit.on_step` adds to a training step of the GPT of bench.py, by the values that are read from each report.

    python benchmarks/bench_on_step.py [--rounds 20] [--level O2] [--optimizer fused|torch]
    python benchmarks/bench_on_step.py --lost-updates

All contenders train the same model in turns of one step, in changing order; a ratio is that of two steps of the same round, and
figures are medians. Reports are read at every step: with ``every=100`` the cost is a hundredth. ``--lost-updates`` compares
steps of two bfloat16 models with torch's AdamW, one of them watched by `LostUpdates`: the GPT, and the MLP, whose steps take a
millisecond.
"""

import argparse
import copy
import statistics
import time

import cases
import torch
import ways
from memory import keep_freed_memory

import ampkit
from ampkit.integrations.lost_updates import LostUpdates

# The values that are read from each report.
READ = {
    "no on_step": None,
    "nothing": (),
    "loss_scale, skipped, grad_norm": ("loss_scale", "skipped", "grad_norm"),
    "the same, and norms": ("loss_scale", "skipped", "grad_norm", "norms"),
}
WARM_UP = 3


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--level", default="O2", choices=("O1", "O2", "O5"))
    parser.add_argument("--optimizer", default="fused", choices=("fused", "torch"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--short", action="store_true", help="a small model, to see that it runs")
    parser.add_argument("--lost-updates", action="store_true", help="LostUpdates in place of on_step")
    args = parser.parse_args()
    keep_freed_memory()
    if args.lost_updates:
        for name in ("mlp", "gpt"):
            measure_lost_updates(name, args)
        return

    case = cases.make("gpt", short=args.short)
    case.to(args.device)
    way = ways.make(args.level + ", fused" * (args.optimizer == "fused"), case, getattr(torch, args.dtype))
    for _ in range(WARM_UP):
        case.step(way, lambda phase: None)
    seconds = {name: [] for name in READ}
    for index in range(args.rounds):
        for name in list(READ)[:: 1 if index % 2 else -1]:
            seconds[name].append(timed(case, way, READ[name]))
    print(f"torch {torch.__version__}, {args.device}, {torch.get_num_threads()} threads, {args.level}, {case.about}")
    print(f"{'read of each report':<32}{'ms':>9}  of a step without on_step")
    for name, its in seconds.items():
        ratios = [ours / plain for ours, plain in zip(its, seconds["no on_step"], strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4, method="inclusive")
        print(f"{name:<32}{statistics.median(its) * 1e3:9.2f}  {ratio:.3f} ({low:.3f}-{high:.3f})")


def timed(case, way, values):
    """Seconds of one step, while these values of its report are read."""
    watch = None
    if values is not None:
        watch = ampkit.on_step(way.optimizers[0], lambda report: [getattr(report, value) for value in values])
    synchronize(case)
    start = time.perf_counter()
    case.step(way, lambda phase: None)
    synchronize(case)
    seconds = time.perf_counter() - start
    if watch is not None:
        watch.remove()
    return seconds


def measure_lost_updates(name, args):
    case = cases.make(name, short=args.short)
    case.to(args.device)
    case.batches = [tuple(x.bfloat16() if x.is_floating_point() else x for x in batch) for batch in case.batches]
    models = [case.models[0].bfloat16(), copy.deepcopy(case.models[0]).bfloat16()]
    pairs = [ways.Float32([m], [torch.optim.AdamW(m.parameters(), lr=1e-5, fused=True)]) for m in models]
    for way in pairs * WARM_UP:
        case.step(way, lambda phase: None)
    ratios = []
    with LostUpdates(pairs[0].optimizers[0]):
        for index in range(args.rounds):
            seconds = {}
            for side in (
                (0, 1) if index % 2 else (1, 0)
            ):  # ten at a time: LostUpdates samples for a share of the time between its steps
                seconds[side] = sum(timed(case, pairs[side], None) for _ in range(10))
            ratios.append(seconds[0] / seconds[1])
    low, ratio, high = statistics.quantiles(ratios, n=4, method="inclusive")
    print(f"LostUpdates, {case.about}: {ratio:.3f} ({low:.3f}-{high:.3f}) of a step without")


def synchronize(case):
    device = case.batches[0][0].device
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


if __name__ == "__main__":
    main()
