"""Train MobileNetV2 on CIFAR-10 in mixed precision, save, resume, and show that resuming changes nothing.

$ python cifar10.py                              # scikit-learn's digits as 32 x 32 images: nothing is downloaded
$ python cifar10.py --data DIR [--download]      # CIFAR-10, as torchvision keeps it in DIR
$ python cifar10.py --iters 200 --resume cifar10.pt
$ python cifar10.py --compare --iters 20         # float32 beside O1, O2 and O5: time and memory of an iteration, and the loss
$ python cifar10.py --check-resume --iters 6     # trains, saves half-way, resumes, and compares every bit
"""

import argparse
import multiprocessing
import re
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchvision

import ampkit

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train MobileNetV2 on CIFAR-10 or digits.", allow_abbrev=False)
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="holds cifar-10-batches-py (default: digits instead)")
    add("--download", action="store_true", help="download CIFAR-10 into DIR")
    add("--opt-level", default="O1", choices=["O0", "O1", "O2", "O3", "O4", "O5"])
    add("--iters", type=int, default=100, metavar="N", help="in all, resumed ones counted")
    add("--batch-size", type=int, default=64, metavar="N", help="a multiple of 8 (default: 64)")
    add("--lr", type=float, default=0.05)
    add("--seed", type=int, default=0)
    add("--save", type=Path, default=Path("cifar10.pt"), metavar="FILE")
    add("--resume", type=Path, metavar="FILE")
    add("--compare", nargs="*", metavar="LEVEL", help="train at O0 and at these (default: O1 O2 O5), and compare")
    add("--check-resume", action="store_true", help="compare a run that was saved and resumed with one that was not")
    return parser.parse_args(argv)


class Run:
    """A model, its optimizer, and the number of iterations that they have run."""

    def __init__(self, args: argparse.Namespace):
        torch.manual_seed(args.seed)
        self.args, self.iteration = args, 0
        # Dropout draws random numbers, whose state a checkpoint would have to hold too.
        model = torchvision.models.mobilenet_v2(num_classes=10, dropout=0.0)
        model.features[0][0].stride = (1, 1)  # for images of 32 pixels instead of 224
        model = model.to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=5e-4)
        self.model, self.optimizer = ampkit.initialize(model, optimizer, opt_level=args.opt_level, verbosity=0)

    def train(self, images: torch.Tensor, labels: torch.Tensor, until: int) -> list[float]:
        """Run iterations up to number ``until``; returns their losses."""
        losses = []
        self.model.train()
        while self.iteration < until:
            # The images are a function of the iteration: no state of the order has to be saved.
            generator = torch.Generator().manual_seed(self.args.seed + self.iteration)
            chosen = torch.randint(len(images), (self.args.batch_size,), generator=generator)
            x, y = images[chosen].to(DEVICE), labels[chosen].to(DEVICE)
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            with ampkit.scale_loss(loss, self.optimizer) as scaled_loss:
                scaled_loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
            self.iteration += 1
        return losses

    @torch.no_grad()
    def accuracy(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        self.model.eval()
        predicted = [self.model(part.to(DEVICE)).argmax(1).cpu() for part in images.split(256)]
        return (torch.cat(predicted) == labels).float().mean().item()

    def state(self) -> dict[str, Any]:
        return {
            "iteration": self.iteration,
            "model": self.model.state_dict(),  # float32 at every level
            "optimizer": self.optimizer.state_dict(),
            "amp": ampkit.state_dict(),
        }

    def load(self, file: Path) -> None:
        """Load a checkpoint, after initialize: its values are float32."""
        saved = torch.load(file, map_location=DEVICE)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        ampkit.load_state_dict(saved["amp"])
        self.iteration = saved["iteration"]


def load_images(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(images to learn, labels, images to judge, labels), images as float32 (N, 3, 32, 32)."""
    if args.data is None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.tensor(digits.images / 8 - 1, dtype=torch.float32)[:, None].expand(-1, 3, -1, -1)
        images = F.interpolate(images, size=32, mode="bilinear", align_corners=False)
        labels = torch.tensor(digits.target)
        return images[:1500], labels[:1500], images[1500:], labels[1500:]
    sets = [torchvision.datasets.CIFAR10(args.data, train, download=args.download) for train in (True, False)]
    pairs = [(torch.tensor(raw.data).permute(0, 3, 1, 2).float() / 128 - 1, torch.tensor(raw.targets)) for raw in sets]
    return *pairs[0], *pairs[1]


def check_resume(args: argparse.Namespace, images: torch.Tensor, labels: torch.Tensor) -> None:
    """Compare a run that is saved half-way and resumed in new objects with one that goes through: every bit of the state."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    whole = Run(args)
    whole.train(images, labels, args.iters // 2)
    torch.save(whole.state(), args.save)
    losses = whole.train(images, labels, args.iters)
    expected = flat(whole.state())
    ampkit.close()

    resumed = Run(args)
    resumed.load(args.save)
    assert resumed.train(images, labels, args.iters) == losses
    actual = flat(resumed.state())
    ampkit.close()
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        same = torch.equal(value, actual[name]) if isinstance(value, torch.Tensor) else value == actual[name]
        assert same, f"{name} differs after resuming"
    print(
        f"{args.opt_level}: {len(losses)} iterations after resuming, {len(expected)} entries of model, optimizer and loss scale: "
        "equal bit for bit"
    )


def compare(args: argparse.Namespace, levels: Sequence[str]) -> None:
    """Print O0 and these levels: milliseconds and memory of an iteration with their ratio to O0's, and the last loss."""
    print("level   ms/iteration   to O0    peak MiB   to O0    last losses")
    base: tuple[float, float] | None = None
    for level in ("O0", *levels):
        # A process for each level: its peak memory is a number of the process.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            seconds, peak, last = pool.apply(measured, (argparse.Namespace(**{**vars(args), "opt_level": level}),))
        base = base or (seconds, peak)
        print(
            f"{level:5} {seconds * 1e3:14.0f} {seconds / base[0]:7.2f} {peak / 2**20:11.0f} {peak / base[1]:7.2f} {last:14.4f}",
            flush=True,
        )


def measured(args: argparse.Namespace) -> tuple[float, float, float]:
    """(seconds of an iteration, the median after the first two; bytes held at most; mean of the last ten losses)."""
    images, labels, _, _ = load_images(args)
    before = held_at_most()
    run, seconds, losses = Run(args), [], []
    for iteration in range(args.iters):
        start = time.perf_counter()
        losses += run.train(images, labels, iteration + 1)  # reads the loss, and so waits for the device
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:] or seconds), held_at_most() - before, statistics.mean(losses[-10:])


def held_at_most() -> int:
    """The peak of bytes held: by tensors on a GPU, by the whole process elsewhere."""
    if DEVICE.type == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.findall(r"VmHWM:\s*(\d+) kB", status.read_text())[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def flat(state: Any, name: str = "") -> dict[str, Any]:
    """Flatten nested dicts and lists into one dict."""
    if isinstance(state, dict):
        return {key: value for part in state for key, value in flat(state[part], f"{name}.{part}").items()}
    if isinstance(state, list):
        return {key: value for i, part in enumerate(state) for key, value in flat(part, f"{name}.{i}").items()}
    return {name: state}


def main(argv: Sequence[str] | None = None) -> float | None:
    args = parse_args(argv)
    if args.batch_size % 8:
        print(f"note: a batch of {args.batch_size} is no multiple of 8; see README.md", file=sys.stderr)
    if args.compare is not None:
        return compare(args, args.compare or ["O1", "O2", "O5"])
    images, labels, judged, truth = load_images(args)
    if args.check_resume:
        return check_resume(args, images, labels)
    run = Run(args)
    if args.resume:
        run.load(args.resume)
        print(f"resumed at iteration {run.iteration}")
    losses = run.train(images, labels, args.iters)
    accuracy = run.accuracy(judged, truth)
    torch.save(run.state(), args.save)
    last = sum(losses[-10:]) / max(len(losses[-10:]), 1)
    print(f"{args.opt_level}: {run.iteration} iterations, last losses {last:.4f}, {accuracy:.1%} of {len(truth)} right")
    print(f"saved: {args.save}")
    ampkit.close()
    return accuracy


if __name__ == "__main__":
    main()
