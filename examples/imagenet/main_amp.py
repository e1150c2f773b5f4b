"""Train a torchvision model on a folder of images, in mixed precision with ampkit.

DIR holds train/ and val/, each with one folder of images per class; without DIR it is the current folder.

One process, at each kind of level (the scripts beside this one must stay beside it, so link it or give its path):
$ python main_amp.py -a resnet50 --b 224 --workers 4 --opt-level O1 DIR
$ python main_amp.py -a resnet50 --b 224 --workers 4 --opt-level O2 --loss-scale 128.0 DIR
$ python main_amp.py -a resnet50 --b 224 --workers 4 --opt-level O3 --keep-batchnorm-fp32 True DIR

Two processes, on two GPUs, or on the CPU where there are fewer:
$ torchrun --nproc_per_node=2 main_amp.py -a resnet50 --b 224 --workers 4 --opt-level O2 --sync_bn DIR

A first try on a laptop, then the same run a little longer, continued where it stopped:
$ python make_digits.py digits
$ python main_amp.py --b 64 --image-size 64 --augment none --max-iters 10 digits
$ python main_amp.py --b 64 --image-size 64 --augment none --max-iters 20 --resume checkpoint.pth.tar digits
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

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
from ampkit.parallel import convert_syncbn_model


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

    group = parser.add_argument_group("what it writes and reads")
    add = group.add_argument
    add("--checkpoint-dir", default=Path("."), type=Path, metavar="DIR", help="gets the latest and the best")
    add("--resume", type=Path, metavar="FILE", help="continue from this checkpoint, bit for bit")
    add("--evaluate", action="store_true", help="validate, and do not train")
    add("--metrics", type=Path, metavar="FILE.jsonl", help="a row per iteration and per validation; --resume appends")
    add("--print-freq", default=10, type=at_least(1), metavar="N", help="iterations between numbers beside the bar")
    add("--prof", default=0, type=at_least(0), metavar="N", help="trace N iterations to CHECKPOINT_DIR/trace.json")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)

    # A process per GPU; where the GPUs of this machine do not suffice, all its processes work on the CPU, because
    # float16 gradients of one cannot be averaged with bfloat16 gradients of the other.
    world_size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    on_cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    device = torch.device("cuda", args.local_rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)  # names an operation that has no such algorithm
    torch.backends.cudnn.benchmark = not args.deterministic

    # Whatever the user may have to correct is looked at before anything slow or shared begins.
    train_set, val_set = data.open_folder(args.data, args.augment, args.image_size, args.seed)
    order = data.TrainOrder(len(train_set), args.batch_size, rank, world_size, args.seed)
    run = {
        "arch": args.arch,
        "classes": len(train_set.classes),
        "images": len(train_set),
        "global_batch": order.global_batch,
        "seed": args.seed,
    }
    saved = checkpoint.load(args.resume) if args.resume else None
    if saved:
        same = ["arch", "classes"] if args.evaluate else run
        checkpoint.check_same_run(saved["run"], {name: run[name] for name in same}, args.resume)
    if world_size > 1:
        dist.init_process_group("nccl" if on_cuda else "gloo")

    # The order matters: layers are replaced before the optimizer sees them, and DDP wraps what ampkit has prepared.
    torch.manual_seed(args.seed)
    model = build_model(args.arch, len(train_set.classes), args.pretrained).to(device)
    memory_format = torch.channels_last if args.channels_last else torch.contiguous_format
    model = model.to(memory_format=memory_format)
    if args.sync_bn:
        model = convert_syncbn_model(model)
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
    if world_size > 1:
        parallel_model = DistributedDataParallel(model, device_ids=[args.local_rank] if on_cuda else None)

    torch.manual_seed(args.seed + rank)  # dropout differs from rank to rank
    steps = order.batches_per_epoch
    iteration, skipped, best_top1 = args.start_epoch * steps, 0, 0.0
    if saved:
        model.load_state_dict(saved["model"])
        if not args.evaluate:
            optimizer.load_state_dict(saved["optimizer"])
            ampkit.load_state_dict(saved["amp"])
            checkpoint.restore_rng_state(saved["rng"], rank, device)
        iteration, skipped, best_top1 = saved["iteration"], saved["skipped"], saved["best_top1"]

    pin_memory = device.type == "cuda"
    batches = data.val_order(len(val_set), args.batch_size, rank, world_size)
    val_loader = data.make_loader(val_set, batches, args.workers, pin_memory)
    rows = metrics.MetricsFile(args.metrics if rank == 0 else None, append=saved is not None)

    def state_of_run() -> dict[str, float]:
        return {
            "epoch": (iteration - 1) // steps if iteration else 0,
            "iteration": iteration,
            "loss_scale": ampkit.state_dict()["loss_scaler0"]["loss_scale"],
            "skipped": skipped,
            "peak_memory_bytes": metrics.peak_memory_bytes(device),
        }

    def validate() -> metrics.Averages:
        found, images_per_s = evaluate(model, val_loader, device, memory_format)
        rows.write(phase="val", images_per_s=images_per_s, **found._asdict(), **state_of_run())
        return found

    if args.evaluate:
        report(rank, f"val {describe(validate())}")
        last = iteration
    else:
        last = min(args.epochs * steps, args.max_iters or math.inf)
        if iteration >= last:
            report(rank, f"nothing to train: {iteration} iterations are done, --epochs or --max-iters ask for {last}")

    train_loader = data.make_loader(train_set, order, args.workers, pin_memory)
    with metrics.trace_iterations(args.prof if rank == 0 else 0, args.checkpoint_dir / "trace.json") as mark_iteration:
        while iteration < last:
            epoch, first = divmod(iteration, steps)
            order.begin(epoch, first, stop=min(steps, last - epoch * steps))
            parallel_model.train()
            clock, done = time.perf_counter(), 0
            bar = tqdm(total=steps, initial=first, desc=f"epoch {epoch}", unit="batch", disable=rank != 0)
            for images, target in data.prefetch(train_loader, device, memory_format):
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(args, order.global_batch, iteration / steps)
                logits, loss = forward(parallel_model, images, target)
                optimizer.zero_grad()
                with ampkit.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                optimizer.step()
                skipped += int(ampkit.step_was_skipped(optimizer))
                iteration, done = iteration + 1, done + 1
                mark_iteration()
                bar.update()

                # Reading a number waits for the device, so without a metrics file it is done now and then only.
                if args.metrics or done % args.print_freq == 0:
                    found = metrics.averages_over_ranks(metrics.batch_sums(loss, logits, target))
                    now = time.perf_counter()
                    images_per_s, clock = order.global_batch * done / (now - clock), now
                    state, done = state_of_run(), 0
                    rows.write(phase="train", images_per_s=images_per_s, **found._asdict(), **state)
                    bar.set_postfix_str(
                        f"{describe(found)}, {images_per_s:.0f} images/s, scale {state['loss_scale']:g}", refresh=False
                    )
            bar.close()

            if world_size > 1:  # running statistics are each rank's own; the checkpoint holds those of rank 0
                for buffer in model.buffers():
                    dist.broadcast(buffer, src=0)
            found = validate()
            is_best = found.top1 > best_top1
            best_top1 = max(best_top1, found.top1)
            report(rank, f"epoch {epoch} val {describe(found)}, best top-1 {best_top1:.2f}")
            rng = checkpoint.collect_rng_states(device)
            if rank == 0:
                state = {
                    "run": run,
                    "iteration": iteration,
                    "skipped": skipped,
                    "best_top1": best_top1,
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "amp": ampkit.state_dict(),
                    "rng": rng,
                }
                checkpoint.save(state, args.checkpoint_dir, is_best)

    rows.close()
    if world_size > 1:
        dist.barrier()  # gloo may abort when a process leaves while another still talks
        dist.destroy_process_group()


def build_model(arch: str, classes: int, pretrained: bool) -> nn.Module:
    model = torchvision.models.get_model(arch, weights=None, num_classes=classes)
    if pretrained:
        weights = torchvision.models.get_model_weights(arch).DEFAULT.get_state_dict(progress=True)
        own = model.state_dict()  # the classifier stays new where the number of classes differs
        fitting = {name: value for name, value in weights.items() if name in own and value.shape == own[name].shape}
        model.load_state_dict(fitting, strict=False)
    return model


def learning_rate(args: argparse.Namespace, global_batch: int, epoch: float) -> float:
    """The rate at a moment, ``epoch`` counting parts of epochs too. A function of time, so nothing has to be saved."""
    peak = args.lr * global_batch / 256
    if epoch < args.warmup_epochs:
        return peak * (epoch + 0.01) / (args.warmup_epochs + 0.01)  # not 0 in the first iteration
    if args.schedule == "step":
        return peak * 0.1 ** sum(epoch >= drop for drop in (30, 60, 80))
    progress = (epoch - args.warmup_epochs) / max(args.epochs - args.warmup_epochs, 1e-9)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))


def forward(model: nn.Module, images: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits, loss). Inception and GoogLeNet return extra classifiers while training, which join at a lower weight."""
    output = model(images)
    if isinstance(output, torch.Tensor):
        return output, F.cross_entropy(output, target)
    logits, *extra = (value for value in output if value is not None)
    return logits, F.cross_entropy(logits, target) + 0.3 * sum(F.cross_entropy(other, target) for other in extra)


@torch.no_grad()
def evaluate(
    model: nn.Module, loader: torch.utils.data.DataLoader, device: torch.device, memory_format: torch.memory_format
) -> tuple[metrics.Averages, float]:
    """Averages over the samples of all ranks, each counted once, and images per second.

    Takes the model without DDP around it: ranks may have different numbers of batches.
    """
    model.eval()
    start, sums = time.perf_counter(), torch.zeros(4, dtype=torch.float64, device=device)
    for images, target in data.prefetch(loader, device, memory_format):
        logits, loss = forward(model, images, target)
        sums += metrics.batch_sums(loss, logits, target)
    found = metrics.averages_over_ranks(sums)
    return found, len(loader.dataset) / (time.perf_counter() - start)


def describe(found: metrics.Averages) -> str:
    return f"loss {found.loss:.4f}, top-1 {found.top1:.2f}, top-5 {found.top5:.2f}"


def report(rank: int, line: str) -> None:
    if rank == 0:
        print(line, flush=True)


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
