"""Which kernels run in which dtype, and for how long: training steps of ResNet-18 under torch.profiler, level by level.

$ python profile_levels.py            # on a GPU 64 images of 224 pixels, on a CPU 8 of 32

It prints a table for each level, the median of several steps, and writes a trace of each (for chrome://tracing or
ui.perfetto.dev) and a chart with a panel for each, on one scale, levels.png.
"""

import argparse
import json
import re
import statistics
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
SETTINGS: dict[str, dict[str, Any]] = {level: {"opt_level": level} for level in ("O0", "O1", "O2", "O3", "O4", "O5")}
SETTINGS["O1 float16"] = {"opt_level": "O1", "patch_torch_functions_type": torch.float16}
# On a CPU O1 is in bfloat16, as O4 is, and float16 has no kernels.
BY_DEFAULT = ("O0", "O1", "O2", "O3", "O4", "O5") if ON_CUDA else ("O0", "O1", "O2", "O3")
# As the trace spells them.
DTYPES = {"float": "float32", "c10::Half": "float16", "c10::BFloat16": "bfloat16", "double": "float64"}
COLOURS = {"float32": "C0", "float16": "C1", "bfloat16": "C2", "float64": "C3", "other": "C7"}
Rows = dict[tuple[str, str], tuple[int, float]]  # (operator or kernel, dtype) -> (calls, milliseconds)


def record(setting: dict[str, Any], batch: int, size: int, steps: int, trace: Path) -> Rows:
    """Train a step, then ``steps`` under the profiler; returns what ran in one of them. ``trace`` gets the last."""
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
    steps_rows = []
    for _ in range(steps):
        with profile(activities=activities, record_shapes=True) as profiler:
            step()
            if ON_CUDA:
                torch.cuda.synchronize()
        profiler.export_chrome_trace(str(trace))
        steps_rows.append(summarise(json.loads(trace.read_text())["traceEvents"]))
    ampkit.close()
    return medians(steps_rows)


def medians(steps: Sequence[Rows]) -> Rows:
    """Take medians row by row; a row that a step lacks took no time there."""
    keys = dict.fromkeys(key for rows in steps for key in rows)
    by_key = {key: [rows.get(key, (0, 0.0)) for rows in steps] for key in keys}
    return {
        key: (statistics.median_high(calls for calls, _ in pairs), statistics.median(ms for _, ms in pairs))
        for key, pairs in by_key.items()
    }


def summarise(events: Sequence[dict[str, Any]]) -> Rows:
    """Sum time by operator, with the dtype of its first floating input: on a GPU of its kernels, else its own on the host."""
    operators = [event for event in events if event.get("cat") == "cpu_op" and event["name"].startswith("aten::")]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    if kernels:
        launched = {operator["args"].get("External id"): operator for operator in operators}
        pairs = [(launched.get(kernel["args"].get("External id")), kernel) for kernel in kernels]
        timed = [
            (f"{short(operator['name'])}: {short(kernel['name'])}", operator, kernel["dur"])
            for operator, kernel in pairs
            if operator is not None
        ]
    else:
        self_times = own_times(operators)
        timed = [(short(operators[index]["name"]), operators[index], self_times[index]) for index in self_times]
    rows: dict[tuple[str, str], tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for name, operator, microseconds in timed:
        calls, milliseconds = rows[name, dtype_of(operator)]
        rows[name, dtype_of(operator)] = calls + 1, milliseconds + microseconds / 1000
    return dict(rows)


def short(name: str) -> str:
    """Strip namespaces and template arguments from a name."""
    return re.sub(r"^void |<.*|\(.*", "", name).rpartition("::")[2]


def own_times(operators: Sequence[dict[str, Any]]) -> dict[int, float]:
    """The time of each operator without that of the operators that it calls."""
    self_times = {index: operator["dur"] for index, operator in enumerate(operators)}
    open_ones: dict[Any, list[int]] = defaultdict(list)  # by thread, the innermost last
    for index in sorted(self_times, key=lambda index: (operators[index]["ts"], -operators[index]["dur"])):
        operator = operators[index]
        above = open_ones[operator["tid"]]
        while above and operators[above[-1]]["ts"] + operators[above[-1]]["dur"] <= operator["ts"]:
            above.pop()
        if above:
            self_times[above[-1]] -= operator["dur"]
        above.append(index)
    return self_times


def dtype_of(operator: dict[str, Any]) -> str:
    for name in operator["args"].get("Input type", []):
        if name in DTYPES:
            return DTYPES[name]
    return "other"


def table(name: str, rows: Rows, top: int) -> str:
    total = sum(milliseconds for _, milliseconds in rows.values())
    lines = [
        f"== {name}: {total:.1f} ms",
        f"{'operator, on a GPU its kernel':<44}{'dtype':<10}{'calls':>6}{'ms':>9}{'share':>8}",
    ]
    for (operator, dtype), (calls, milliseconds) in sorted(rows.items(), key=lambda row: -row[1][1])[:top]:
        share = milliseconds / total
        lines.append(f"{operator[:43]:<44}{dtype:<10}{calls:>6}{milliseconds:>9.2f}{share:>8.1%}")
    return "\n".join(lines)


def draw(results: dict[str, Rows], top: int, path: Path) -> None:
    """Draw a panel for each level, all on one scale, so that bars compare across levels."""
    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    size = (9, 0.7 + len(results) * (0.7 + 0.22 * top))
    figure, panels = pyplot.subplots(len(results), figsize=size, layout="constrained", squeeze=False, sharex=True)
    totals = {name: sum(milliseconds for _, milliseconds in rows.values()) for name, rows in results.items()}
    first, base = next(iter(totals.items()))
    for panel, (name, rows) in zip(panels[:, 0], results.items()):
        longest = sorted(rows.items(), key=lambda row: -row[1][1])[:top]
        places = range(len(longest))
        bars = panel.barh(places, [ms for _, (_, ms) in longest], color=[COLOURS[dtype] for (_, dtype), _ in longest])
        panel.bar_label(bars, [f"{ms:.2f} ms, {dtype}" for (_, dtype), (_, ms) in longest], padding=3, fontsize=8)
        panel.set_yticks(places, [operator[:43] for (operator, _), _ in longest], fontsize=8)
        panel.invert_yaxis()
        panel.margins(x=0.25)
        compared = "" if name == first else f", {totals[name] / base:.2f} times {first}"
        panel.set_title(f"{name}: {totals[name]:.1f} ms in all{compared}", loc="left", fontsize=10)
    panels[-1, 0].set_xlabel("milliseconds")
    figure.suptitle("A training step of ResNet-18: where its time goes; colours are dtypes of inputs", fontsize=11)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> dict[str, Rows]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=64 if ON_CUDA else 8)
    parser.add_argument("--size", type=int, default=224 if ON_CUDA else 32, help="pixels of a side")
    parser.add_argument("--top", type=int, default=8, help="rows of each table and panel")
    parser.add_argument("--steps", type=int, default=5, help="whose median is taken")
    parser.add_argument("--only", nargs="*", choices=list(SETTINGS), default=list(BY_DEFAULT))
    parser.add_argument("--out", type=Path, default=Path("profile"), help="folder for traces and chart")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    results = {}
    for name in args.only:
        trace = args.out / f"{name.replace(' ', '_')}.json"
        results[name] = record(SETTINGS[name], args.batch, args.size, args.steps, trace)
        print(table(name, results[name], args.top), end="\n\n", flush=True)
    draw(results, args.top, args.out / "levels.png")
    print(f"traces and chart: {args.out}")
    return results


if __name__ == "__main__":
    main()
