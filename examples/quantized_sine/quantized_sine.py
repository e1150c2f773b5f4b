"""Learn a wave of four levels in float32, under torch.amp, at O1 and at O2; compare time, memory, loss and the pictures.

$ python quantized_sine.py            # on a GPU 512 x 512 points and 512 steps, on a CPU 64 x 64 and 128

Each contender runs in a process of its own. Times are those of the fastest step and the fastest prediction: on a GPU by the clock,
on a CPU the CPU time of one thread, which other programs disturb least. Memory is what torch allocated, on a CPU the tensors alive.
"""

import argparse
import contextlib
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import matplotlib
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ampkit

CONTENDERS = {"float32": "float32", "amp": "torch.amp", "O1": "ampkit O1", "O2": "ampkit O2"}
ON_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_CUDA else "cpu")
LOWER_PRECISION = torch.float16 if ON_CUDA else torch.bfloat16
AMD = {"time": -46.4, "memory": -49.8, "inference time": -32.2, "inference memory": -49.8}


class ConvModel(nn.Sequential):
    """A network of 1 x 1 convolutions: the same small network at each point of the grid."""

    def __init__(self, width: int = 256):
        layers: list[nn.Module] = [nn.Conv2d(2, width, 1)]
        for _ in range(2):
            layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 1)]
        super().__init__(*layers, nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 1, 1))


def wave(grid: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the points (1, 2, grid, grid) of the unit square, and at each the sum of two cosines in four levels, 0 to 1."""
    line = torch.linspace(0, 1, grid)
    x, y = torch.meshgrid(line, line, indexing="xy")
    total = torch.cos(2 * math.pi * 4 * x) + torch.cos(2 * math.pi * 2 * y)  # -2 to 2
    levels = ((total + 2) / 4 * 3).round() / 3
    return torch.stack([x, y])[None].to(DEVICE), levels[None, None].to(DEVICE)


def contend(name: str, grid: int, steps: int, prediction: Path) -> dict[str, float]:
    """Train and predict as one of the contenders."""
    torch.manual_seed(0)
    points, levels = wave(grid)
    meter = Meter()
    with meter:
        model = ConvModel().to(DEVICE)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        if name in ("O1", "O2"):
            model, optimizer = ampkit.initialize(model, optimizer, opt_level=name, verbosity=0)
        scaler = torch.amp.GradScaler(DEVICE.type, enabled=name == "amp")

        def casts():
            return torch.autocast(DEVICE.type, LOWER_PRECISION) if name == "amp" else contextlib.nullcontext()

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            with casts():
                loss = F.mse_loss(model(points).float(), levels)
            if name in ("O1", "O2"):
                with ampkit.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            return loss.detach()

        step(), step()  # with the optimizer's state
    training_bytes = meter.peak
    seconds, losses = [], []
    for _ in range(steps - 2):
        seconds.append(timed(lambda: losses.append(step())))

    model.eval()
    optimizer.zero_grad()
    with torch.inference_mode(), casts():
        with (meter := Meter()):
            model(points)
        predicting = [timed(lambda: model(points)) for _ in range(40)]
        torch.save(model(points).float().cpu(), prediction)
    return {
        "loss": torch.stack(losses)[-10:].mean().item(),
        "seconds": min(seconds),
        "bytes": training_bytes,
        "inference seconds": min(predicting),
        "inference bytes": meter.peak + sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
    }


def timed(work) -> float:
    if ON_CUDA:
        torch.cuda.synchronize()
    clock = time.perf_counter if ON_CUDA else time.process_time
    start = clock()
    work()
    if ON_CUDA:
        torch.cuda.synchronize()
    return clock() - start


class Meter(TorchDispatchMode):
    """``peak`` bytes that came into being while it was on: torch's own count on CUDA, elsewhere that of living storages."""

    def __enter__(self):
        self.peak, self._alive = 0, {}
        if ON_CUDA:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
            return self
        return super().__enter__()

    def __exit__(self, *exception):
        if ON_CUDA:
            self.peak = torch.cuda.max_memory_allocated() - self._before
            return None
        self._alive.clear()
        return super().__exit__(*exception)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        from torch.multiprocessing.reductions import StorageWeakRef

        inputs = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in inputs and storage._cdata not in self._alive:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: (ref, size) for key, (ref, size) in self._alive.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result


def tensors_in(value) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]


def table(results: dict[str, dict[str, float]]) -> str:
    head = f"{'':<12}{'loss':>8}{'step':>10}{'memory':>12}{'inference':>12}{'memory':>12}"
    lines = [head]
    for name, row in results.items():
        lines.append(
            f"{CONTENDERS[name]:<12}{row['loss']:>8.4f}{row['seconds'] * 1e3:>7.1f} ms{row['bytes'] / 2**20:>8.1f} MiB"
            f"{row['inference seconds'] * 1e3:>9.1f} ms{row['inference bytes'] / 2**20:>8.1f} MiB"
        )
    lines += ["", f"{'to float32':<20}{'step':>10}{'memory':>12}{'inference':>12}{'memory':>12}"]
    base = results["float32"]
    for name in [name for name in results if name != "float32"]:
        change = [100 * (results[name][key] / base[key] - 1) for key in list(base)[1:]]
        lines.append(
            f"{CONTENDERS[name]:<20}{change[0]:>+9.1f}%" + "".join(f"{value:>+11.1f}%" for value in change[1:])
        )
    amd = list(AMD.values())
    lines.append(f"{'AMD, torch.amp, 2024':<20}{amd[0]:>+9.1f}%" + "".join(f"{value:>+11.1f}%" for value in amd[1:]))
    return "\n".join(lines)


def draw(pictures: dict[str, torch.Tensor], path: Path) -> None:
    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(pictures), figsize=(4 * len(pictures), 4), layout="constrained")
    for panel, (title, values) in zip(panels, pictures.items()):
        panel.imshow(values, vmin=0, vmax=1, origin="lower", extent=(0, 1, 0, 1))
        panel.set_title(title)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grid", type=int, default=512 if ON_CUDA else 64, help="points of a side")
    parser.add_argument("--steps", type=int, default=512 if ON_CUDA else 128)
    parser.add_argument("--out", type=Path, default=Path("quantized_sine"), help="folder for pictures and numbers")
    parser.add_argument("--contender", choices=CONTENDERS, help="this one only, in this process; prints JSON")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.contender:
        torch.set_num_threads(1)
        prediction = args.out / f"{args.contender}.pt"
        print(json.dumps(contend(args.contender, args.grid, args.steps, prediction)))
        return
    size = ["--grid", str(args.grid), "--steps", str(args.steps), "--out", str(args.out)]
    results = {}
    for name in CONTENDERS:
        command = [sys.executable, __file__, *size, "--contender", name]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        results[name] = json.loads(done.stdout.splitlines()[-1])
    (args.out / "results.json").write_text(json.dumps(results, indent=2))
    pictures = {"truth": wave(args.grid)[1].cpu()[0, 0]}
    for name in ("float32", "O2"):
        pictures[CONTENDERS[name]] = torch.load(args.out / f"{name}.pt")[0, 0]
    draw(pictures, args.out / "waves.png")
    print(
        f"{args.grid} x {args.grid} points, {args.steps} steps, {DEVICE.type}, {str(LOWER_PRECISION).removeprefix('torch.')}"
    )
    print(table(results))
    print(f"pictures: {args.out / 'waves.png'}")


if __name__ == "__main__":
    main()
