"""Train a torchvision model on a folder of images, in mixed precision with ampkit.

DIR holds train/ and val/, each with one folder of images per class; without DIR it is the current folder. README.md has a command
line for each level, for several processes and for resuming. It prints a bar of progress, and after each epoch

    epoch 0 val loss 1.3631, top-1 59.89, top-5 96.15, best top-1 59.89

$ python make_digits.py digits                   # a first try on a laptop
$ python main_amp.py --b 64 --image-size 64 --augment none --opt-level O2 --max-iters 22 digits
$ python main_amp.py -a resnet50 --b 224 --workers 4 --opt-level O2 DIR
$ torchrun --nproc_per_node=2 main_amp.py -a resnet50 --b 224 --workers 4 --opt-level O2 --sync_bn DIR

The scripts beside this one must stay beside it, so link it or give its path. `main` tells the story, and what it calls follows
in the order of time: prepare, resume, train, validate, save.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import checkpoint
import data
import metrics
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import ampkit
from ampkit.parallel import convert_syncbn_model, fully_shard

AUTO = Path("auto")  # --resume auto


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    # No abbreviations: a flag added later would change what they mean.
    parser = argparse.ArgumentParser(
        description="Train a torchvision model on a folder of images, in mixed precision with ampkit.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("data", nargs="?", default=Path("."), type=Path, metavar="DIR", help="holds train/ and val/ (default: here)")

    group = parser.add_argument_group("model and data")
    add = group.add_argument
    names = torchvision.models.list_models(module=torchvision.models)
    add("-a", "--arch", default="resnet18", choices=names, metavar="NAME", help="a classifier (default: resnet18)")
    add("--pretrained", action="store_true", help="begin with torchvision's ImageNet weights")
    add("--image-size", default=224, type=at_least(1), metavar="N", help="pixels of a side (default: 224)")
    add("--augment", default="imagenet", choices=["imagenet", "none"], help="random crops and flips, or whole images")
    add("--workers", "-j", default=4, type=at_least(0), metavar="N", help="loader processes (default: 4)")

    group = parser.add_argument_group("training")
    add = group.add_argument
    add("--epochs", default=90, type=at_least(0), metavar="N")
    add("--start-epoch", default=0, type=at_least(0), metavar="N", help="first epoch; --resume knows its own")
    add("--max-iters", type=at_least(1), metavar="N", help="stop after N iterations in all, resumed ones counted")
    add("--b", "-b", "--batch-size", dest="batch_size", default=256, type=at_least(1), metavar="N", help="per process")
    add("--lr", default=0.1, type=float, help="for a global batch of 256; grows and shrinks with it (default: 0.1)")
    add("--schedule", default="step", choices=["step", "cosine"], help="lr / 10 at epochs 30, 60, 80, or a cosine to 0")
    add("--warmup-epochs", default=5.0, type=float, metavar="N", help="lr rises in a line for so long (default: 5)")
    add("--momentum", default=0.9, type=float)
    add("--weight-decay", default=1e-4, type=float)
    add("--clip", type=float, metavar="NORM", help="clip the norm of the gradients")
    add("--accumulate", default=1, type=at_least(1), metavar="N", help="cut each batch in N, to save memory")
    add("--seed", default=0, type=at_least(0))
    add("--deterministic", action="store_true", help="the same losses, bit for bit, in every run")

    group = parser.add_argument_group("mixed precision")
    add = group.add_argument
    add("--opt-level", default="O1", choices=["O0", "O1", "O2", "O3", "O4", "O5"])
    add("--keep-batchnorm-fp32", type=true_or_false, metavar="True|False", help="override the level's choice")
    add("--loss-scale", type=scale, metavar="S", help="a number, or 'dynamic'; overrides the level's choice")
    add("--channels-last", action="store_true", help="memory format that suits convolutions in lower precision")

    group = parser.add_argument_group("processes")
    add = group.add_argument
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    add("--local-rank", "--local_rank", default=local_rank, type=int, help="set by the launcher")
    add("--sync_bn", "--sync-bn", action="store_true", help="batch norm over the batches of all processes")
    add("--fsdp", action="store_true", help="FSDP2: each process holds its share of weights and momentum")

    group = parser.add_argument_group("what it writes and reads")
    add = group.add_argument
    add("--checkpoint-dir", default=Path("."), type=Path, metavar="DIR", help="gets the latest and the best")
    add("--save-freq", type=at_least(1), metavar="N", help="a checkpoint every N iterations too, not only after epochs")
    add(
        "--resume",
        type=Path,
        metavar="FILE",
        help="continue from this checkpoint, bit for bit; 'auto': from the latest",
    )
    add("--evaluate", action="store_true", help="validate, and do not train")
    add("--metrics", type=Path, metavar="FILE.jsonl", help="a row per iteration and per validation; --resume appends")
    add("--print-freq", default=10, type=at_least(1), metavar="N", help="iterations between numbers beside the bar")
    add("--prof", default=0, type=at_least(0), metavar="N", help="trace N iterations to CHECKPOINT_DIR/trace.json")
    args = parser.parse_args(argv)
    if args.fsdp and "WORLD_SIZE" not in os.environ:
        parser.error("--fsdp needs a launcher: torchrun --nproc_per_node=N main_amp.py ...")
    if args.fsdp and args.channels_last:
        parser.error("--fsdp shards contiguous weights only: leave out --channels-last")
    return args


@dataclass
class Run:
    """The objects that training works on, and how far it has come."""

    args: argparse.Namespace
    device: torch.device
    rank: int
    world_size: int
    memory_format: torch.memory_format
    order: data.TrainOrder
    model: nn.Module
    parallel_model: nn.Module  # the same, in DistributedDataParallel where there are several processes, but for --fsdp
    optimizer: torch.optim.Optimizer
    rows: metrics.MetricsFile
    iteration: int = 0
    skipped: int = 0
    best_top1: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)  # that a resumed run must share

    def state(self) -> dict[str, float]:
        return {
            "epoch": (self.iteration - 1) // self.order.batches_per_epoch if self.iteration else 0,
            "iteration": self.iteration,
            "loss_scale": ampkit.state_dict()["loss_scaler0"]["loss_scale"],
            "skipped": self.skipped,
            "peak_memory_bytes": metrics.peak_memory_bytes(self.device),
        }

    def report(self, line: str) -> None:
        if self.rank == 0:
            print(line, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    device, rank, world_size = choose_device(args)

    # Whatever the user may have to correct is looked at before anything slow or shared begins.
    train_set, val_set = data.open_folder(args.data, args.augment, args.image_size, args.seed)
    order = data.TrainOrder(len(train_set), args.batch_size, rank, world_size, args.seed)
    settings = {
        "arch": args.arch,
        "classes": len(train_set.classes),
        "images": len(train_set),
        "global_batch": order.global_batch,
        "seed": args.seed,
    }
    saved = load_saved(args, settings)
    if world_size > 1 or args.fsdp:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        checkpoint.check_same_on_all_ranks(saved)

    model, parallel_model, optimizer = prepare(args, len(train_set.classes), device, rank, world_size)
    rows = open_rows(args, rank, saved)
    run = Run(args, device, rank, world_size, memory_format_of(args), order, model, parallel_model, optimizer, rows)
    run.settings = settings
    run.iteration = args.start_epoch * order.batches_per_epoch
    if saved:
        resume(run, saved)

    pin_memory = device.type == "cuda"
    batches = data.val_order(len(val_set), args.batch_size, rank, world_size)
    val_loader = data.make_loader(val_set, batches, args.workers, pin_memory)
    train_loader = data.make_loader(train_set, order, args.workers, pin_memory)
    if args.evaluate:
        run.report(f"val {describe(validate(run, val_loader))}")
    else:
        train(run, train_loader, val_loader)

    rows.close()
    if dist.is_initialized():
        dist.barrier()  # gloo may abort when a process leaves while another still talks
        dist.destroy_process_group()


def choose_device(args: argparse.Namespace) -> tuple[torch.device, int, int]:
    """(device, rank, number of processes), with torch set up for them.

    A process per GPU; where the GPUs of this machine do not suffice, all its processes work on the CPU, because float16
    gradients of one cannot be averaged with bfloat16 gradients of the other.
    """
    world_size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    on_cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    device = torch.device("cuda", args.local_rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)  # names an operation that has no such algorithm
    torch.backends.cudnn.benchmark = not args.deterministic
    return device, rank, world_size


def load_saved(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Load the checkpoint that --resume names, if it is one of such a run."""
    path = checkpoint.latest(args.checkpoint_dir) if args.resume == AUTO else args.resume
    if path is None:
        return None
    saved = checkpoint.load(path)
    same = ["arch", "classes"] if args.evaluate else settings
    checkpoint.check_same_run(saved["run"], {name: settings[name] for name in same}, path)
    return saved


def prepare(
    args: argparse.Namespace, classes: int, device: torch.device, rank: int, world_size: int
) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """(model, the model in DDP where there is DDP, optimizer), all at the opt level.

    The order matters: layers are replaced and weights sharded before the optimizer sees them, and DDP wraps what ampkit has
    prepared.
    """
    torch.manual_seed(args.seed)
    model = build_model(args.arch, classes, args.pretrained).to(device).to(memory_format=memory_format_of(args))
    if args.sync_bn:
        model = convert_syncbn_model(model)
    if args.fsdp:
        shard(model, args, device, world_size)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    model, optimizer = ampkit.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
        verbosity=int(rank == 0),
    )
    parallel_model = model
    if world_size > 1 and not args.fsdp:
        parallel_model = DistributedDataParallel(model, device_ids=[args.local_rank] if device.type == "cuda" else None)
    torch.manual_seed(args.seed + rank)  # dropout differs from rank to rank
    return model, parallel_model, optimizer


def build_model(arch: str, classes: int, pretrained: bool) -> nn.Module:
    model = torchvision.models.get_model(arch, weights=None, num_classes=classes)
    if pretrained:
        weights = torchvision.models.get_model_weights(arch).DEFAULT.get_state_dict(progress=True)
        new = model.state_dict()  # the classifier stays new where the number of classes differs
        fitting = {name: value for name, value in weights.items() if name in new and value.shape == new[name].shape}
        model.load_state_dict(fitting, strict=False)
    return model


def shard(model: nn.Module, args: argparse.Namespace, device: torch.device, world_size: int) -> None:
    """Shard by FSDP2 at the opt level, a group for each part of the model: one is gathered while the one before computes."""
    settings = dict(opt_level=args.opt_level, keep_batchnorm_fp32=args.keep_batchnorm_fp32)
    mesh = dist.device_mesh.init_device_mesh(device.type, (world_size,))
    for part in model.children():
        if any(True for _ in part.parameters()) and not isinstance(part, nn.ModuleList | nn.ModuleDict):
            fully_shard(part, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)


def memory_format_of(args: argparse.Namespace) -> torch.memory_format:
    return torch.channels_last if args.channels_last else torch.contiguous_format


def open_rows(args: argparse.Namespace, rank: int, saved: dict[str, Any] | None) -> metrics.MetricsFile:
    """Open rank 0's metrics file. --resume appends; 'auto' also drops rows that a killed run wrote after its last checkpoint."""
    done = saved["iteration"] if saved else 0
    drop_after = done if args.resume == AUTO else None
    return metrics.MetricsFile(args.metrics if rank == 0 else None, append=saved is not None, drop_after=drop_after)


def resume(run: Run, saved: dict[str, Any]) -> None:
    """Continue from the checkpoint; --evaluate needs its weights only."""
    checkpoint.load_model(run.model, saved["model"])
    if not run.args.evaluate:
        checkpoint.load_optimizer(run.optimizer, saved["optimizer"])
        ampkit.load_state_dict(saved["amp"])
        checkpoint.restore_rng_state(saved["rng"], run.rank, run.device)
    run.iteration, run.skipped, run.best_top1 = (saved[name] for name in ("iteration", "skipped", "best_top1"))


def train(run: Run, loader: torch.utils.data.DataLoader, val_loader: torch.utils.data.DataLoader) -> None:
    """Run epochs, each followed by a validation and a checkpoint, as far as --epochs and --max-iters ask."""
    args = run.args
    last = min(args.epochs * run.order.batches_per_epoch, args.max_iters or math.inf)
    if run.iteration >= last:
        run.report(f"nothing to train: {run.iteration} iterations are done, --epochs or --max-iters ask for {last}")
    traced = args.prof if run.rank == 0 else 0
    with metrics.trace_iterations(traced, args.checkpoint_dir / "trace.json") as mark_iteration:
        while run.iteration < last:
            epoch = train_one_epoch(run, loader, last, mark_iteration)
            averages = validate(run, val_loader)
            is_best = averages.top1 > run.best_top1
            run.best_top1 = max(run.best_top1, averages.top1)
            run.report(f"epoch {epoch} val {describe(averages)}, best top-1 {run.best_top1:.2f}")
            save(run, is_best)


def train_one_epoch(run: Run, loader: torch.utils.data.DataLoader, last: int, mark_iteration: Callable) -> int:
    """Train to the end of the epoch, or to iteration ``last``; returns the epoch. Saves every ``--save-freq`` iterations."""
    args, order = run.args, run.order
    steps = order.batches_per_epoch
    epoch, first = divmod(run.iteration, steps)
    order.begin(epoch, first, stop=min(steps, last - epoch * steps))
    run.parallel_model.train()
    clock, done = time.perf_counter(), 0
    bar = tqdm(total=steps, initial=first, desc=f"epoch {epoch}", unit="batch", disable=run.rank != 0)
    for images, target in data.prefetch(loader, run.device, run.memory_format):
        for group in run.optimizer.param_groups:
            group["lr"] = learning_rate(args, order.global_batch, run.iteration / steps)
        logits, loss = train_step(run, images, target)
        run.skipped += int(ampkit.step_was_skipped(run.optimizer))  # torch's SGD has waited to know it already
        run.iteration, done = run.iteration + 1, done + 1
        mark_iteration()
        bar.update()

        # Reading a number waits for the device, so without a metrics file it is done now and then only.
        if args.metrics or done % args.print_freq == 0:
            averages = metrics.averages_over_ranks(metrics.batch_sums(loss, logits, target))
            now = time.perf_counter()
            images_per_s, clock = order.global_batch * done / (now - clock), now
            state, done = run.state(), 0
            run.rows.write(phase="train", images_per_s=images_per_s, **averages._asdict(), **state)
            numbers = f"{describe(averages)}, {images_per_s:.0f} images/s, scale {state['loss_scale']:g}"
            bar.set_postfix_str(numbers, refresh=False)
        if args.save_freq and run.iteration % args.save_freq == 0 and run.iteration < min(last, (epoch + 1) * steps):
            save(run, is_best=False)
    bar.close()
    return epoch


def learning_rate(args: argparse.Namespace, global_batch: int, epoch: float) -> float:
    """Return the rate at a moment, ``epoch`` counting parts of epochs too. A function of time, so nothing has to be saved."""
    peak = args.lr * global_batch / 256
    if epoch < args.warmup_epochs:
        return peak * (epoch + 0.01) / (args.warmup_epochs + 0.01)  # not 0 in the first iteration
    if args.schedule == "step":
        return peak * 0.1 ** sum(epoch >= drop for drop in (30, 60, 80))
    progress = (epoch - args.warmup_epochs) / max(args.epochs - args.warmup_epochs, 1e-9)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))


def train_step(run: Run, images: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Take one step on one batch, in ``--accumulate`` parts; returns (logits, loss) of the batch."""
    parts = list(zip(images.chunk(run.args.accumulate), target.chunk(run.args.accumulate)))
    logits, losses = [], []
    run.optimizer.zero_grad()
    for number, (part, its_target) in enumerate(parts, 1):
        # Gradients travel from process to process once, in the backward pass of the last part.
        with without_reduction(run) if number < len(parts) else nullcontext():
            output, loss = forward(run.parallel_model, part, its_target)
            loss = loss * (len(part) / len(images))
            with ampkit.scale_loss(loss, run.optimizer) as scaled_loss:
                scaled_loss.backward()
        logits.append(output.detach())
        losses.append(loss.detach())
    if run.args.clip is not None:
        ampkit.clip_grad_norm_(run.optimizer, run.args.clip)
    run.optimizer.step()
    return torch.cat(logits), torch.stack(losses).sum()


@contextmanager
def without_reduction(run: Run) -> Iterator[None]:
    """Keep gradients of the backward pass inside on their process."""
    if run.world_size == 1:
        yield
    elif run.args.fsdp:
        run.model.set_requires_gradient_sync(False)
        yield
        run.model.set_requires_gradient_sync(True)
    else:
        with run.parallel_model.no_sync():
            yield


def forward(model: nn.Module, images: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (logits, loss). Inception and GoogLeNet return extra classifiers while training, which join at a lower weight."""
    output = model(images)
    if isinstance(output, torch.Tensor):
        return output, F.cross_entropy(output, target)
    logits, *extra = (value for value in output if value is not None)
    return logits, F.cross_entropy(logits, target) + 0.3 * sum(F.cross_entropy(other, target) for other in extra)


@torch.no_grad()
def validate(run: Run, loader: torch.utils.data.DataLoader) -> metrics.Averages:
    """Averages over the samples of all ranks, each counted once; a row of the metrics.

    Takes the model without DDP around it: ranks may have different numbers of batches. Under FSDP2 each forward pass gathers
    weights from all ranks, so a rank that has run out of batches joins in without one.
    """
    share_buffers(run)
    run.model.eval()
    start, sums = time.perf_counter(), torch.zeros(4, dtype=torch.float64, device=run.device)
    for images, target in data.prefetch(loader, run.device, run.memory_format):
        logits, loss = forward(run.model, images, target)
        sums += metrics.batch_sums(loss, logits, target)
    if run.args.fsdp:
        size = run.args.image_size
        most = len(data.val_order(len(loader.dataset), run.args.batch_size, 0, run.world_size))
        for _ in range(most - len(loader)):
            run.model(torch.zeros(1, 3, size, size, device=run.device))
    averages = metrics.averages_over_ranks(sums)
    images_per_s = len(loader.dataset) / (time.perf_counter() - start)
    run.rows.write(phase="val", images_per_s=images_per_s, **averages._asdict(), **run.state())
    return averages


def save(run: Run, is_best: bool) -> None:
    """Save a checkpoint by rank 0, with whole float32 tensors: it continues with any number of processes, with FSDP2 or without."""
    share_buffers(run)
    state = {
        "run": run.settings,
        "iteration": run.iteration,
        "skipped": run.skipped,
        "best_top1": run.best_top1,
        "model": checkpoint.whole(run.model.state_dict()),
        "optimizer": checkpoint.whole(run.optimizer.state_dict()),
        "amp": ampkit.state_dict(),
        "rng": checkpoint.collect_rng_states(run.device),
    }
    if run.rank == 0:
        checkpoint.save(state, run.args.checkpoint_dir, is_best)


def share_buffers(run: Run) -> None:
    """Copy rank 0's running statistics to all ranks: each has its own while training, and FSDP2 never makes them equal."""
    if run.world_size > 1:
        for buffer in run.model.buffers():
            dist.broadcast(buffer, src=0)


def describe(averages: metrics.Averages) -> str:
    return f"loss {averages.loss:.4f}, top-1 {averages.top1:.2f}, top-5 {averages.top5:.2f}"


def at_least(smallest: int):
    def integer(text: str) -> int:
        if int(text) < smallest:
            raise argparse.ArgumentTypeError(f"found {text}, expected {smallest} or more")
        return int(text)

    return integer


def true_or_false(text: str) -> bool:
    if text not in ("True", "False"):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected True or False")
    return text == "True"


def scale(text: str) -> float | str:
    try:
        return text if text == "dynamic" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number or 'dynamic'") from None


if __name__ == "__main__":
    try:
        main()
    except (data.DataFolderError, checkpoint.CheckpointError, ampkit.AmpkitError) as error:
        sys.exit(f"main_amp.py: error: {error}")
