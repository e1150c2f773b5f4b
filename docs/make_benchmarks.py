"""Make docs/benchmarks.md and its drawings, and a table for each model beside the results, of what `make bench` measured.

$ python docs/make_benchmarks.py [benchmarks/results/NAME.json]

The newest results, if none are named. Pages are functions of the results alone: a test asks whether they are those that the results
make. Drawings keep the numbers that they show in their description, by which the test compares them.
"""

import json
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "benchmarks" / "results"
PAGE = HERE / "benchmarks.md"
OPTIMIZERS = {"sgd": "SGD with momentum", "adam": "Adam", "adamw": "AdamW"}
DRAWN = ["autocast", "O1, fused", "O2, fused", "O5, fused"]

INTRODUCTION = """# How fast

This page shows the time and memory of whole training steps: in float32, with torch.autocast and GradScaler, and at O1, O2
and O5. "fused" means ampkit's optimizer; the other columns have torch's fused one. Ratios depend on the
processor, so measure on yours: `make bench` takes 25 minutes on a CPU and writes this page, and
[`ampkit tune`](tuning.md) measures a model of your own.
`python benchmarks/beside.py --unscaled` compares with torch.autocast without a loss scale, which bfloat16 does not need:
[its figures](../benchmarks/results/2026-11-29-beside-avx512.md).
"""
SHORT = """!!! warning "Not a measurement"

    These numbers come from `make bench BENCH=--short`: tiny models, two rounds, on a busy machine. They show what the
    page looks like, and nothing else.
"""
ON_A_GPU = """## On a GPU

On an H100, at O2 with clipping, the time after the backward pass is 0.82 of torch.autocast's in bfloat16. It is 0.71 at loss
scale 1, and 0.65 with moments in 8 bits. In float16 it equals torch.autocast's (124 M parameters). Kernels that step run at 0.92
to 0.97 of the rate of a copy. [All figures](../benchmarks/results/2026-11-27-nvidia-h100.md).
"""
KERNELS = """### What a kernel moves

No card has counted these figures. A [run from PTX](../tests/ptx/README.md) counts the bytes that warps ask for; the others are
ptxas's, for an A100 and an H100.

{table}

- "Needed" counts each input once and each output once. A ratio above 1.05 fails `make test-ptx`.
- A sector is 32 bytes of memory, and full if one request of a warp takes all of it. A thread takes its eight float32 elements in
  two requests of 16 bytes. So each request takes half of every sector (0%), and the halves meet in the cache.
- Spills are bytes that a thread stores and loads: none in any of the 81 entries, for either card. Occupancy follows from registers
  and shared memory. A block has 512 threads, and a multiprocessor has room for four: 50% are two blocks at once.
"""
METHOD = """## How it is measured

- Every way of training runs in its own process. The processes take turns; a turn is one step, or as many as fit into a
  tenth of a second.
- A ratio compares two turns of the same round. The tables have the median over all rounds.
- Peak memory is measured in another process, above what the process held before the model was made: weights, gradients,
  optimizer state, activations, and libraries that torch loads when first needed. ampkit's wrappers around torch's functions take
  4 to 5 MiB of it, once per process, whatever the model: this shows in small models.
- With several micro-batches gradients add up in float32 (no `delay_unscale`). FusedSGD has `set_grad_none=True`.

`make bench BENCH=--all` measures every cell.

## Other benchmarks

| script | what it measures |
|---|---|
| `bench_dispatch.py` | the cost of a call at O1 |
| `bench_kernels.py` | each multi-tensor kernel |
| `bench_optimizer_step.py` | everything after the backward pass |
| `bench_iteration.py` | the host's part of an iteration |
| `bench_on_step.py` | what `ampkit.on_step` adds to a step of the GPT |
| `bench_running_statistics.py` | what it costs to keep running statistics finite |
| `flow.py` | the calls of an iteration, and in how many files |
| `troubles.py` | planted troubles in six ways of training: whether `ampkit diagnose` names line, kind and cure |
| `state_dtypes.py` | the loss of a small GPT with moments in 8 bits and in bfloat16 |

What they printed is in [benchmarks/results](../benchmarks/results).
"""
COLUMNS = """Milliseconds of a step are medians; "to autocast" is the ratio to torch.autocast's, with quartiles. Backward contains
the exit of `scale_loss`, and step contains clearing gradients and updating the scale. "Saved" is what autograd keeps for the
backward pass, parameters left out. "Host reads" are values that a step hands to the host: each would be a wait on a GPU.
"""


def newest():
    """The results of the latest day; of several processors, the last by name."""
    return max(RESULTS.glob("*.json"))


def title(cell):
    return (
        cell["name"]
        + f", {cell['accumulate']} micro-batches" * (cell["accumulate"] > 1)
        + ", compiled" * cell["compiled"]
    )


def ratios(cell, way, to):
    """Quartiles of the time of a step, relative to another way's in the same round."""
    pairs = zip(cell["ways"][way]["seconds"], cell["ways"][to]["seconds"], strict=True)
    return statistics.quantiles([seconds / reference for seconds, reference in pairs], n=4, method="inclusive")


def speed_up(cell, way):
    return 1 / ratios(cell, way, "float32")[1]


def table(head, rows):
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def summary(results):
    ways = list(results["cells"][0]["ways"])[1:]
    rows = [
        [title(cell), *(f"{speed_up(cell, way):.2f}" if way in cell["ways"] else "-" for way in ways)]
        for cell in results["cells"]
    ]
    return table(["speed-up over float32", *ways], rows)


def memory(results):
    eager = [cell for cell in results["cells"] if cell["ways"]["float32"]["peak_bytes"] is not None]
    ways = list(eager[0]["ways"])
    held = lambda its: f"{its['peak_bytes'] / 2**20:.0f}"  # noqa: E731
    rows = [[title(cell), *(held(cell["ways"][way]) if way in cell["ways"] else "-" for way in ways)] for cell in eager]
    return table(["peak memory, MiB", *ways], rows)


def section(cell):
    head = ["", "ms", "to autocast", "forward", "backward", "step", "peak MiB", "saved MB", "host reads", "loss"]
    rows = []
    for way, its in cell["ways"].items():
        low, ratio, high = ratios(cell, way, "autocast")
        rows.append(
            [
                way,
                f"{statistics.median(its['seconds']) * 1e3:.2f}",
                "1" if way == "autocast" else f"{ratio:.2f} ({low:.2f}-{high:.2f})",
                *(f"{seconds * 1e3:.2f}" for seconds in its["phases"].values()),
                "-" if its["peak_bytes"] is None else f"{its['peak_bytes'] / 2**20:.0f}",
                f"{its['saved_bytes'] / 1e6:.1f}",
                "-" if its["host_reads"] is None else str(its["host_reads"]),
                f"{its['loss']:.4f}",
            ]
        )
    rounds = len(cell["ways"]["float32"]["seconds"])
    parameters = cell["parameters"] / 1e6
    about = (
        f"{cell['about']}; {parameters:.1f} M parameters, {OPTIMIZERS[cell['optimizer']]}, {rounds} rounds; the loss is "
        f"that of step {cell['warm_up']}."
    )
    return f"## {title(cell)}\n\n{about[0].upper()}{about[1:]}\n\n{table(head, rows)}\n"


def span(results, *ways):
    """The least and the greatest time of a step relative to torch.autocast's, over all models and these ways."""
    quotients = [ratios(cell, way, "autocast")[1] for cell in results["cells"] for way in ways if way in cell["ways"]]
    return f"{min(quotients):.2f} to {max(quotients):.2f}"


def page(results, name):
    bfloat16 = {True: ", with bfloat16 instructions", False: ", without bfloat16 instructions", None: ""}
    commit, dirty, _ = results["commit"].partition("-dirty")
    commit += " with changes that had no commit" if dirty else ""
    where = (
        f"Measured on {results['processor']}, {results['cores']} cores{bfloat16[results['bfloat16_instructions']]}, "
        f"{results['threads']} threads, in {results['dtype']}, with torch {results['torch']} and Python {results['python']}. "
        f"ampkit was {results['ampkit']} at commit {commit}; {results['date']}, in {results['minutes']} minutes."
    )
    tells = (
        f"By model, a step at O1 takes {span(results, 'O1', 'O1, fused')} times as long as torch.autocast's. At O2 it takes "
        f"{span(results, 'O2', 'O2, fused')} times as long, at O5 {span(results, 'O5', 'O5, fused')} times. Each model, "
        f"phase by phase: [tables](../benchmarks/results/{Path(name).stem}.md), [numbers](../benchmarks/results/{name})."
    )
    return "\n".join(
        [
            INTRODUCTION,
            *([SHORT] if results["short"] else []),
            where,
            "\n## Speed\n",
            tells,
            "\n![Speed-up over float32, by model](bench-speed.svg)\n",
            summary(results),
            "\n## Memory\n",
            "![Peak memory relative to float32, by model](bench-memory.svg)\n",
            memory(results),
            "",
            ON_A_GPU,
            KERNELS.format(table=max(RESULTS.glob("*-kernels-from-ptx.md")).read_text().strip()),
            METHOD,
        ]
    )


def details(results):
    """The page beside the results: a table for each model."""
    return "\n".join(["# Each model, phase by phase\n", COLUMNS, *(section(cell) for cell in results["cells"])])


def drawings(results):
    """{file: (what its axis shows, {way: {title of the cell: number}})}."""
    cells = results["cells"]
    eager = [cell for cell in cells if cell["ways"]["float32"]["peak_bytes"] is not None]

    def share(cell, way):
        return cell["ways"][way]["peak_bytes"] / cell["ways"]["float32"]["peak_bytes"]

    return {
        "bench-speed.svg": (
            "speed-up over float32",
            {way: {title(cell): round(speed_up(cell, way), 3) for cell in cells} for way in DRAWN},
        ),
        "bench-memory.svg": (
            "peak memory, of float32's",
            {way: {title(cell): round(share(cell, way), 3) for cell in eager} for way in DRAWN},
        ),
    }


def draw(path, label, numbers):
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "ampkit"
    matplotlib.rcParams["svg.fonttype"] = "none"  # text as text, which is smaller
    from matplotlib import pyplot

    titles = list(next(iter(numbers.values())))
    figure, axes = pyplot.subplots(figsize=(7.5, 0.42 * len(titles) + 1.2), layout="constrained")
    height = 0.8 / len(numbers)
    for index, ((way, values), colour) in enumerate(zip(numbers.items(), ("0.6", "C0", "C1", "C2"), strict=True)):
        places = [row + (index - (len(numbers) - 1) / 2) * height for row in range(len(titles))]
        axes.barh(places, list(values.values()), height, color=colour, label=way)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(range(len(titles)), titles)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    figure.legend(loc="outside upper center", ncols=len(numbers), frameon=False)
    figure.savefig(path, metadata={"Date": None, "Description": json.dumps(numbers)})
    pyplot.close(figure)


def write(path):
    results = json.loads(path.read_text())
    PAGE.write_text(page(results, path.name))
    (RESULTS / f"{path.stem}.md").write_text(details(results))
    for name, (label, numbers) in drawings(results).items():
        draw(HERE / name, label, numbers)
    print(f"{PAGE}: made of {path.name}")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else newest())
