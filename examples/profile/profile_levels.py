"""Which operators run in which dtype, and for how long: a training step of ResNet-18 under torch.profiler at several levels.

$ python profile_levels.py            # on a GPU 64 images of 224 pixels, on a CPU 8 of 32

It prints a table for each setting, and writes the trace of each (for chrome://tracing or ui.perfetto.dev) and a chart.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.nn.functional as F
import torchvision
from torch.profiler import ProfilerActivity, profile

import ampkit

ON_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_CUDA else "cpu")
SETTINGS: dict[str, dict[str, Any]] = {
    "O0": {"opt_level": "O0"},
    "O1 float16": {"opt_level": "O1", "patch_torch_functions_type": torch.float16},
    "O1 bfloat16": {"opt_level": "O1", "patch_torch_functions_type": torch.bfloat16},
    "O2": {"opt_level": "O2"},
}
# As the trace spells them.
DTYPES = {"float": "float32", "c10::Half": "float16", "c10::BFloat16": "bfloat16", "double": "float64"}
Rows = dict[tuple[str, str], tuple[int, float]]  # (operator, dtype) -> (calls, milliseconds)


def record(setting: dict[str, Any], batch: int, size: int, trace: Path) -> Rows:
    """Train two steps, the second under the profiler; what ran in it."""
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = ampkit.initialize(model, optimizer, verbosity=0, **setting)
    images, target = torch.randn(batch, 3, size, size, device=DEVICE), torch.randint(10, (batch,), device=DEVICE)

    def step() -> None:
        optimizer.zero_grad()
        with ampkit.scale_loss(F.cross_entropy(model(images), target), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    step()  # first-time work
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if ON_CUDA else [])
    with profile(activities=activities, record_shapes=True) as profiler:
        step()
        if ON_CUDA:
            torch.cuda.synchronize()
    ampkit.close()
    profiler.export_chrome_trace(str(trace))
    return summarise(json.loads(trace.read_text())["traceEvents"])


def summarise(events: Sequence[dict[str, Any]]) -> Rows:
    """Time by operator and by the dtype of its first floating input: of its kernels on a GPU, else its own on the host."""
    operators = [event for event in events if event.get("cat") == "cpu_op" and event["name"].startswith("aten::")]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    time: dict[int, float]  # by position in `operators`, microseconds
    if kernels:
        launched = {operator["args"].get("External id"): index for index, operator in enumerate(operators)}
        time = defaultdict(float)
        for kernel in kernels:
            index = launched.get(kernel["args"].get("External id"))
            if index is not None:
                time[index] += kernel["dur"]
    else:
        time = own_times(operators)
    rows: dict[tuple[str, str], tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for index, microseconds in time.items():
        operator = operators[index]
        key = operator["name"].removeprefix("aten::"), dtype_of(operator)
        calls, milliseconds = rows[key]
        rows[key] = calls + 1, milliseconds + microseconds / 1000
    return dict(rows)


def own_times(operators: Sequence[dict[str, Any]]) -> dict[int, float]:
    """The time of each without that of the operators that it calls."""
    own = {index: operator["dur"] for index, operator in enumerate(operators)}
    open_ones: dict[Any, list[int]] = defaultdict(list)  # by thread, the innermost last
    for index in sorted(own, key=lambda index: (operators[index]["ts"], -operators[index]["dur"])):
        operator = operators[index]
        above = open_ones[operator["tid"]]
        while above and operators[above[-1]]["ts"] + operators[above[-1]]["dur"] <= operator["ts"]:
            above.pop()
        if above:
            own[above[-1]] -= operator["dur"]
        above.append(index)
    return own


def dtype_of(operator: dict[str, Any]) -> str:
    for name in operator["args"].get("Input type", []):
        if name in DTYPES:
            return DTYPES[name]
    return "other"


def table(name: str, rows: Rows, top: int) -> str:
    total = sum(milliseconds for _, milliseconds in rows.values())
    lines = [f"== {name}: {total:.1f} ms", f"{'operator':<34}{'dtype':<10}{'calls':>6}{'ms':>9}{'share':>8}"]
    for (operator, dtype), (calls, milliseconds) in sorted(rows.items(), key=lambda row: -row[1][1])[:top]:
        share = milliseconds / total
        lines.append(f"{operator[:33]:<34}{dtype:<10}{calls:>6}{milliseconds:>9.2f}{share:>8.1%}")
    return "\n".join(lines)


def draw(results: dict[str, Rows], path: Path) -> None:
    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3), layout="constrained")
    left = [0.0] * len(results)
    for dtype in [*DTYPES.values(), "other"]:
        widths = [sum(ms for (_, found), (_, ms) in rows.items() if found == dtype) for rows in results.values()]
        if any(widths):
            axes.barh(list(results), widths, left=left, label=dtype)
            left = [a + b for a, b in zip(left, widths)]
    axes.set(xlabel="milliseconds in operators, by the dtype of their input", title="A training step of ResNet-18")
    axes.invert_yaxis()
    axes.legend()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> dict[str, Rows]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=64 if ON_CUDA else 8)
    parser.add_argument("--size", type=int, default=224 if ON_CUDA else 32, help="pixels of a side")
    parser.add_argument("--top", type=int, default=8, help="rows of each table")
    parser.add_argument("--only", nargs="*", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--out", type=Path, default=Path("profile"), help="folder for traces and chart")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    results = {}
    for name in args.only:
        trace = args.out / f"{name.replace(' ', '_')}.json"
        results[name] = record(SETTINGS[name], args.batch, args.size, trace)
        print(table(name, results[name], args.top), end="\n\n", flush=True)
    draw(results, args.out / "levels.png")
    print(f"traces and chart: {args.out}")
    return results


if __name__ == "__main__":
    main()
