"""Draw the pictures of the README: what a parameter costs and what a loaded checkpoint learns, with torch and with ampkit.

$ python docs/make_picture.py            # writes docs/picture-*.svg and prints their numbers

Losses are those of ``python benchmarks/convergence bible``: a GPT that has read the King James Bible is rounded to bfloat16, as
checkpoints are published, and goes on with another translation. Its results are in benchmarks/results. Bytes are those of the
tensors that live between two steps: weights, what ampkit keeps beside them, gradients and AdamW's two moments.
"""

import argparse
import contextlib
import gc
import json
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import matplotlib
import torch
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "benchmarks"), str(HERE.parent)]

import ampkit  # noqa: E402
from ampkit.casting.narrow_gradients import stored_gradient  # noqa: E402
from ampkit.optimizers import FusedAdam  # noqa: E402

RESULTS = HERE.parent / "benchmarks" / "results" / "2026-11-29-convergence-bible.jsonl"
STEPS = 800  # of each run
SHAPE = 512, 256  # of the layer whose bytes are counted


class Contender(NamedTuple):
    run: str  # its name in the results
    weights: torch.dtype
    autocast: bool = False
    level: str | None = None
    state_dtype: str | None = None
    colour: str = ""  # that of plain float32 depends on the theme


CONTENDERS = {
    "torch.amp, float32 weights": Contender("torch.autocast", torch.float32, autocast=True),
    "torch, bfloat16 weights": Contender("torch.optim.AdamW in bfloat16", torch.bfloat16, colour="tab:red"),
    "ampkit O5": Contender("O5", torch.bfloat16, level="O5", colour="tab:cyan"),
    "ampkit O5, 8-bit moments": Contender(
        "O5, int8 moments", torch.bfloat16, level="O5", state_dtype="int8", colour="tab:blue"
    ),
}

#: Words and lines, and the bars of float32, on light and on dark pages.
THEMES = {"": ("#1f2430", "#8a8f99"), "-dark": ("#e6e8ee", "#9aa1b0")}


def prepare(model: nn.Module, way: Contender, lr: float):
    """The model in the precision of the contender, and its AdamW."""
    model = model.to(way.weights)
    make = torch.optim.AdamW
    if way.state_dtype:
        make = lambda params, **settings: FusedAdam(params, state_dtype=way.state_dtype, **settings)  # noqa: E731
    optimizer = make(model.parameters(), lr=lr, weight_decay=0.1)
    return ampkit.initialize(model, optimizer, enabled=way.level is not None, opt_level=way.level or "O0", verbosity=0)


def backward(way: Contender, compute, optimizer) -> float:
    with torch.autocast("cpu", torch.bfloat16) if way.autocast else contextlib.nullcontext():
        loss = compute()
    with ampkit.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    return loss.item()


class Curve(NamedTuple):
    """Losses of a contender, in the mean over seeds: those on the way, and that of text which was not seen."""

    losses: list[float]
    final: float


def curves(results: Path = RESULTS) -> dict[str, Curve]:
    runs = [json.loads(line) for line in results.read_text().splitlines()]
    learned = {}
    for name, way in CONTENDERS.items():
        own = [run["result"] for run in runs if run["run"][:2] == ["go on", way.run]]
        losses = [statistics.mean(values) for values in zip(*(result["curve"] for result in own), strict=True)]
        learned[name] = Curve(losses, statistics.mean(result["value"] for result in own))
    return learned


def bytes_per_parameter(way: Contender) -> dict[str, float]:
    """The bytes per parameter, by use. Counts live tensors with at least as many elements as the weight, and each memory once."""
    model, optimizer = prepare(nn.Linear(*SHAPE, bias=False), way, lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        x = torch.randn(4, SHAPE[0], dtype=torch.float32 if way.autocast else way.weights)
        backward(way, lambda: model(x).float().square().mean(), optimizer)  # noqa: B023
        optimizer.step()
    gc.collect()
    weight, large = model.weight, SHAPE[0] * SHAPE[1]
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    lives = {"weight": memory([weight]), "gradient": memory([stored_gradient(weight)])}
    lives["moments"] = memory(x for x in optimizer.state[weight].values() if x.dim())
    lives["rest"] = memory(x for x in tensors if x.numel() >= large)
    for name in ("weight", "gradient", "moments"):
        lives["rest"] = {place: size for place, size in lives["rest"].items() if place not in lives[name]}
    ampkit.close()
    return {name: sum(lives[name].values()) / large for name in ("weight", "rest", "gradient", "moments")}


def memory(tensors) -> dict[int, int]:
    """{address: bytes} of what the tensors lie in."""
    storages = [x.untyped_storage() for x in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def draw(sizes: dict[str, dict[str, float]], learned: dict[str, Curve], folder: Path) -> None:
    """Write picture-bytes.svg and picture-loss.svg, and both for dark pages."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    numbers = {"bytes": sizes, "loss": {name: round(its.final, 4) for name, its in learned.items()}}
    for theme, (ink, grey) in THEMES.items():
        inks = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), ink)
        # The same file for the same numbers, and text as text, which is smaller.
        with matplotlib.rc_context({"svg.hashsalt": "ampkit", "svg.fonttype": "none", "font.size": 9, **inks}):
            for name, fill, data in (("bytes", draw_bytes, sizes), ("loss", draw_losses, learned)):
                figure, axes = pyplot.subplots(figsize=(4.1, 3.3), layout="constrained")
                fill(axes, data, ink, grey)
                axes.spines[["top", "right"]].set_visible(False)
                metadata = {"Date": None, "Description": json.dumps(numbers)}
                figure.savefig(folder / f"picture-{name}{theme}.svg", metadata=metadata, transparent=True)
                pyplot.close(figure)


def draw_bytes(axes, sizes: dict[str, dict[str, float]], ink: str, grey: str) -> None:
    shades = {"weight": 1.0, "rest": 0.75, "gradient": 0.5, "moments": 0.25}
    for row, (name, its) in enumerate(sizes.items()):
        start = 0.0
        axes.text(0, row - 0.3, name, va="bottom")
        for part, size in its.items():
            axes.barh(row, size, 0.48, start, color=CONTENDERS[name].colour or grey, alpha=shades[part])
            if size >= 1.5:
                inside = ink if shades[part] < 0.6 else "white" if CONTENDERS[name].colour else "black"
                written, font = ("grad" if part == "gradient" else part, 6.5) if size < 2.5 else (part, 7.5)
                axes.text(start + size / 2, row, written, ha="center", va="center", color=inside, fontsize=font)
            start += size
        axes.text(start + 0.25, row, f"{start:.2f}".removesuffix(".00"), va="center", fontweight="bold")
    axes.spines["left"].set_visible(False)
    axes.set(title="Bytes per parameter, AdamW", xlim=(0, 17.5), xticks=range(0, 17, 4), yticks=[], ylim=(3.4, -0.7))


def draw_losses(axes, learned: dict[str, Curve], ink: str, grey: str) -> None:
    for name, width in (
        ("torch, bfloat16 weights", 2.0),
        ("torch.amp, float32 weights", 5.0),
        ("ampkit O5, 8-bit moments", 1.6),
    ):
        losses = learned[name].losses
        steps = [STEPS * (place + 0.5) / len(losses) for place in range(len(losses))]
        axes.plot(steps, losses, color=CONTENDERS[name].colour or grey, linewidth=width, label=name)
    axes.set(title="Loss of a GPT, fine-tuned", xlabel="step", xlim=(0, STEPS))
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE, help="a folder; default: docs")
    args = parser.parse_args()
    sizes = {name: bytes_per_parameter(way) for name, way in CONTENDERS.items()}
    learned = curves()
    draw(sizes, learned, args.out)
    print("| | bytes per parameter | loss of text that was not seen |\n|---|---|---|")
    for name, its in learned.items():
        print(f"| {name} | {sum(sizes[name].values()):.2f} | {its.final:.3f} |")


if __name__ == "__main__":
    main()
