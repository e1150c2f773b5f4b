"""Train ResNet-18 on handwritten digits at O0, O1, O2 and under torch.autocast, taking turns; draw and tabulate what came out.

$ python docs/make_picture.py            # writes docs/losses.svg and prints the table of the README

Each contender has a process of its own, and one thread. A step is timed by the CPU time that it took, which what else runs
on the machine disturbs least. Memory is the most that another process, whose heap gives back what is freed, held in a few
steps above what it held before the model was built: weights, gradients, optimizer state and activations.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))

CONTENDERS = {"O0": "float32 (O0)", "autocast": "torch.autocast", "O1": "ampkit O1", "O2": "ampkit O2"}
SIZE = 64  # pixels of a side
WARM_UP = 5  # steps that pay for first-time work
STEPS_FOR_MEMORY = 3
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
GIVES_BACK = {**ENVIRONMENT, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def contend(level: str) -> None:
    """In a process of its own: a step for each line on standard input, answered by 'loss seconds'."""
    import convergence
    import torch
    from memory import keep_freed_memory

    torch.set_num_threads(1)
    keep_freed_memory()
    learn, _ = convergence.load(SIZE)
    run = convergence.Run(level, learn, seed=0)
    for _ in sys.stdin:
        start = time.process_time()
        (loss,) = run.train(1)
        print(loss, time.process_time() - start, flush=True)


def hold(level: str) -> None:
    """In a process of its own: print the bytes that training holds at most."""
    import convergence
    import torch

    torch.set_num_threads(1)
    learn, _ = convergence.load(SIZE)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    convergence.Run(level, learn, seed=0).train(STEPS_FOR_MEMORY)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)


def command(option: str, level: str) -> list[str]:
    return [sys.executable, str(HERE / "make_picture.py"), option, level]


def take_turns(steps: int) -> dict[str, list[tuple[float, float]]]:
    """(loss, seconds) of each step, by contender."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": ENVIRONMENT}
    processes = {level: subprocess.Popen(command("--contend", level), **pipes) for level in CONTENDERS}
    rows: dict[str, list[tuple[float, float]]] = {level: [] for level in CONTENDERS}
    for _ in range(steps):
        for level, process in processes.items():
            process.stdin.write("step\n")
            process.stdin.flush()
            rows[level].append(tuple(map(float, process.stdout.readline().split())))
    for process in processes.values():
        process.communicate()
    return rows


def peaks() -> dict[str, int]:
    """The bytes that each contender holds at most."""
    return {level: int(subprocess.check_output(command("--hold", level), env=GIVES_BACK)) for level in CONTENDERS}


def table(rows: dict[str, list[tuple[float, float]]], held: dict[str, int]) -> str:
    seconds = {level: statistics.median(row[1] for row in steps[WARM_UP:]) for level, steps in rows.items()}
    lines = ["| | CPU time a step | speed-up | peak memory | last 10 losses |", "|---|---|---|---|---|"]
    for level, steps in rows.items():
        loss = statistics.mean(row[0] for row in steps[-10:])
        peak = held[level] / 2**20
        speed_up = seconds["O0"] / seconds[level]
        name = CONTENDERS[level]
        lines.append(f"| {name} | {seconds[level] * 1000:.0f} ms | {speed_up:.2f}x | {peak:.0f} MiB | {loss:.4f} |")
    return "\n".join(lines)


def draw(rows: dict[str, list[tuple[float, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "ampkit"  # the same file for the same losses
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    styles = {"O0": ("black", "-", 2.5), "autocast": ("tab:gray", ":", 2), "O1": ("tab:blue", "-", 1.3)}
    for level, steps in rows.items():
        colour, line, width = styles.get(level, ("tab:orange", "--", 1.3))
        losses = [row[0] for row in steps]
        axes.plot(range(1, len(losses) + 1), losses, line, color=colour, linewidth=width, label=CONTENDERS[level])
    axes.set(xlabel="step", ylabel="training loss", yscale="log", title="ResNet-18 on handwritten digits")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--out", type=Path, default=HERE / "losses.svg", help="default: docs/losses.svg")
    for option in ("--contend", "--hold"):
        parser.add_argument(option, choices=CONTENDERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contend:
        return contend(args.contend)
    if args.hold:
        return hold(args.hold)
    rows = take_turns(args.steps)
    draw(rows, args.out)
    print(table(rows, peaks()))


if __name__ == "__main__":
    main()
