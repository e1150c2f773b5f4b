"""Train ResNet-18 on handwritten digits in float32 (O0) and in mixed precision (O1), and compare the two.

$ python demo.py            # what `make demo` runs; writes to demo/ in the current folder

The digits are written as an image folder, each level runs main_amp.py in a process of its own, and the table and the
plot at the end come from the metrics files of these runs. It fails when a level does not learn. Where torch has no kernels
for lower precision, and falls back on loops many times slower, images are smaller and O1 runs a few iterations only.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib
import torch
from make_digits import make_digits

LEVELS = ("O0", "O1")
ENOUGH = 97.0  # percent, top-1
WARM_UP = 5  # iterations that pay for first-time work
RECIPE = (
    "--arch resnet18 --augment none --b 64 --workers 1 --print-freq 1 --epochs 5 --warmup-epochs 1 --schedule cosine"
).split()
IMAGE_SIZE, SMALL_IMAGE_SIZE = 64, 32
TOO_SLOW = 5.0  # times float32's time, for a convolution
FEW_ITERATIONS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description="Train ResNet-18 on digits at O0 and O1, and compare.")
    parser.add_argument("--dir", default=Path("demo"), type=Path, help="where everything is written (default: demo)")
    parser.add_argument("--short", action="store_true", help=f"{FEW_ITERATIONS} iterations of each: shows that it runs")
    args = parser.parse_args()
    folder = args.dir

    counts = make_digits(folder / "digits")
    print(f"{folder / 'digits'}: {counts['train']:,} handwritten digits to learn from, {counts['val']:,} to test with")
    lower_precision = "float16" if torch.cuda.is_available() else "bfloat16"
    print(f"O0 computes in float32, O1 where it is safe in {lower_precision}.")
    slowness = slowness_of(getattr(torch, lower_precision))
    is_slow = slowness > TOO_SLOW
    if is_slow:
        print(
            f"This torch takes {slowness:.0f} times as long for a convolution in {lower_precision} as in float32 on this "
            f"machine. So images have {SMALL_IMAGE_SIZE} pixels, and O1 runs {FEW_ITERATIONS} iterations only."
        )
    print(flush=True)

    size = ["--image-size", str(SMALL_IMAGE_SIZE if is_slow or args.short else IMAGE_SIZE)]
    shortened = LEVELS if args.short else ("O1",) if is_slow else ()
    few = ["--max-iters", str(FEW_ITERATIONS)]
    runs = {level: train(level, folder, size + few * (level in shortened)) for level in LEVELS}
    summaries = {level: summarise(rows) for level, rows in runs.items()}
    plot = draw_losses(runs, folder / "losses.png")

    if args.short:
        print(
            f"\nBoth levels ran {FEW_ITERATIONS} iterations: --short only shows that the demo runs. Without it, the demo compares."
        )
    else:
        print("\n" + table(summaries, shortened))
        print(f"\nspeed-up: images/s over O0's, each the median of all iterations after the first {WARM_UP}")
    if shortened and not args.short:
        print(f"O1's losses were within {largest_difference(runs):.1%} of O0's.")
    print(f"loss curves: {plot}")
    if not shortened and (note := precision_note(summaries["O1"]["images_per_s"] / summaries["O0"]["images_per_s"])):
        print(note)

    whole = {level: row for level, row in summaries.items() if level not in shortened}
    failed = [f"{level} reached {row['top1']:.2f}%" for level, row in whole.items() if row["top1"] < ENOUGH]
    if failed:
        sys.exit(f"demo.py: error: {', '.join(failed)} top-1; expected {ENOUGH:g}% or more. Rows: {folder}/*.jsonl")


def slowness_of(lower_precision: torch.dtype) -> float:
    """Measure how many times as long as in float32 a convolution takes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    seconds = {}
    for dtype in (torch.float32, lower_precision):
        x, w = (torch.ones(shape, device=device, dtype=dtype) for shape in ((8, 64, 16, 16), (64, 64, 3, 3)))
        times = []
        for _ in range(4):
            start = time.perf_counter()
            torch.nn.functional.conv2d(x, w, padding=1).float().sum().item()  # waits for the device
            times.append(time.perf_counter() - start)
        seconds[dtype] = min(times)
    return seconds[lower_precision] / seconds[torch.float32]


def largest_difference(runs: dict[str, list[dict[str, Any]]]) -> float:
    """The largest difference between training losses of O1 and O0 at the same iteration, relative to O0's."""
    losses = {level: [row["loss"] for row in rows if row["phase"] == "train"] for level, rows in runs.items()}
    return max(abs(low - full) / full for full, low in zip(losses["O0"], losses["O1"]))


def train(level: str, folder: Path, options: list[str]) -> list[dict[str, Any]]:
    """Run main_amp.py at one level; returns the rows of its metrics file."""
    rows = folder / f"{level}.jsonl"
    script = Path(__file__).with_name("main_amp.py")
    options = [*options, "--opt-level", level, "--metrics", str(rows), "--checkpoint-dir", str(folder / level)]
    print(f"== {level}", flush=True)
    process = subprocess.run([sys.executable, str(script), *RECIPE, *options, str(folder / "digits")], check=False)
    if process.returncode != 0:
        sys.exit(
            f"demo.py: error: main_amp.py at {level} ended with exit code {process.returncode}; see above for why."
        )
    return [json.loads(line) for line in rows.read_text().splitlines()]


def summarise(rows: list[dict[str, Any]]) -> dict[str, float]:
    speeds = [row["images_per_s"] for row in rows if row["phase"] == "train"]
    return {
        "images_per_s": statistics.median(speeds[WARM_UP:]),
        "peak_memory_bytes": max(row["peak_memory_bytes"] for row in rows),
        "top1": [row["top1"] for row in rows if row["phase"] == "val"][-1],
    }


def table(summaries: dict[str, dict[str, float]], shortened: Iterable[str]) -> str:
    lines = [f"{'level':<6}{'images/s':>10}{'speed-up':>10}{'peak memory':>14}{'val top-1':>11}"]
    for level, row in summaries.items():
        speed_up = row["images_per_s"] / summaries["O0"]["images_per_s"]
        memory = row["peak_memory_bytes"] / 2**20
        top1 = "-" if level in shortened else f"{row['top1']:.2f}%"
        lines.append(f"{level:<6}{row['images_per_s']:>10.1f}{speed_up:>9.2f}x{memory:>10,.0f} MiB{top1:>11}")
    return "\n".join(lines)


def draw_losses(runs: dict[str, list[dict[str, Any]]], path: Path) -> Path:
    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for level, rows in runs.items():
        train_rows = [row for row in rows if row["phase"] == "train"]
        axes.plot([row["iteration"] for row in train_rows], [row["loss"] for row in train_rows], label=level, alpha=0.8)
    axes.set(xlabel="iteration", ylabel="training loss", yscale="log", title="ResNet-18 on handwritten digits")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def precision_note(speed_up: float) -> str:
    """A note for readers on a machine that mixed precision does not make faster."""
    if torch.cuda.is_available():
        return ""
    native = cpu_has_bfloat16()
    if native is False:
        return (
            "note: this CPU has no bfloat16 instructions (avx512_bf16 or amx_bf16) and emulates them in float32,"
            " so O1 need not be faster here, and may well be slower."
        )
    if native is None and speed_up < 1:
        return "note: whether this CPU has bfloat16 instructions could not be found out; without them O1 is no faster."
    return ""


def cpu_has_bfloat16() -> bool | None:
    """Whether the CPU multiplies bfloat16 by itself; None where the system does not tell (only Linux does)."""
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return None
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


if __name__ == "__main__":
    main()
