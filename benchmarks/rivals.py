"""Optimizers that train a bfloat16 model, beside float32 and torch.amp: loss, bytes, time of a step.

    python benchmarks/rivals.py loss [--steps 1000] [--seeds 3] [--width 192] [--layers 6] [--batch 4] [--lr 1e-3]
                                     [--results FILE] [--only NAME ...]
    python benchmarks/rivals.py bytes [--width 768] [--layers 14]
    python benchmarks/rivals.py time [--width 768] [--layers 12]

Those that need a package which is not installed are left out (pip install bitsandbytes torchao torch-optimi heavyball
pytorch_optimizer). ``loss`` learns the language of state_dtypes.py: the loss of text that was not seen, in the mean over the seeds,
its distance from float32 with the least and the most of a seed, and how far a norm's weight, which begins at 1, has moved. A run
whose result FILE has is not done again. ``bytes`` counts tensors that live, for each parameter: after a step, and the most while a
backward pass runs. ``time`` takes the median of a step over given gradients, where all take turns, and of its ratio to the step of
torch's fused AdamW over float32 weights: run it on a quiet machine.
"""

import argparse
import contextlib
import gc
import math
import statistics
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from bfloat16_products import fast_enough
from cases import Gpt
from resumable import Results
from state_dtypes import LENGTH, WARM_UP, WORDS, Language

from ampkit.optimizers import AdamW

BF16 = torch.bfloat16
SETTINGS = dict(weight_decay=0.1, betas=(0.9, 0.95))


class Way(NamedTuple):
    stored: torch.dtype
    make: Callable
    autocast: bool = False


def optimi(p, lr):
    from optimi import AdamW

    return AdamW(p, lr=lr, kahan_sum=True, **SETTINGS)


def heavyball(p, lr):
    import heavyball

    return heavyball.AdamW(p, lr=lr, **SETTINGS)


def kahan(p, lr):
    from pytorch_optimizer import StableAdamW

    return StableAdamW(p, lr=lr, kahan_sum=True, **SETTINGS)


def bitsandbytes(p, lr):
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(p, lr=lr, min_8bit_size=0, **SETTINGS)


def torchao(bits):
    def make(p, lr):
        from torchao import optim

        kind = getattr(optim, f"AdamW{bits}bit")
        return kind(p, lr=lr, bf16_stochastic_round=True, **SETTINGS)

    return make


def ours(**more):
    return lambda p, lr: AdamW(p, lr=lr, **SETTINGS, **more)


def of_torch(**more):
    return lambda p, lr: torch.optim.AdamW(p, lr=lr, **SETTINGS, **more)


class CopiesByHand(torch.optim.AdamW):
    """torch's AdamW over float32 copies of bfloat16 weights, which get the copies' values after each step."""

    def __init__(self, params, lr):
        self.stored = list(params)
        super().__init__([p.detach().float() for p in self.stored], lr=lr, **SETTINGS)

    def step(self):
        copies = self.param_groups[0]["params"]
        for stored, copy in zip(self.stored, copies):
            copy.grad = stored.grad.float()
        super().step()
        torch._foreach_copy_([stored.detach() for stored in self.stored], copies)
        for copy in copies:
            copy.grad = None

    def zero_grad(self):
        for stored in self.stored:
            stored.grad = None


WAYS = {
    "torch, float32": Way(torch.float32, of_torch(fused=True)),
    "torch.amp": Way(torch.float32, of_torch(fused=True), autocast=True),
    "torch, bfloat16": Way(BF16, of_torch()),
    "torch, float32 copies by hand": Way(BF16, CopiesByHand),
    "ampkit": Way(BF16, ours()),
    "ampkit, bfloat16 moments": Way(BF16, ours(state_dtype=BF16)),
    "ampkit, int8 moments": Way(BF16, ours(state_dtype="int8")),
    "ampkit, in backward": Way(BF16, ours(step_in_backward=True)),
    "ampkit, int8, in backward": Way(BF16, ours(state_dtype="int8", step_in_backward=True)),
    "optimi, Kahan": Way(BF16, optimi),
    "pytorch_optimizer StableAdamW, Kahan": Way(BF16, kahan),
    "heavyball": Way(BF16, heavyball),
    "bitsandbytes, 8 bits": Way(BF16, bitsandbytes),
    "torchao, 8 bits, stochastic": Way(BF16, torchao(8)),
    "torchao, 4 bits, stochastic": Way(BF16, torchao(4)),
}


def gpt(args, vocabulary, way):
    model = Gpt(
        width=args.width, layers=args.layers, heads=max(1, args.width // 64) * 2, length=LENGTH, vocabulary=vocabulary
    )
    for param in model.parameters():
        if param.dim() > 1:
            torch.nn.init.normal_(param, 0.0, 0.02)
    return model.to(way.stored)


def loss_of(model, way, x, y):
    with torch.autocast("cpu", BF16) if way.autocast else contextlib.nullcontext():
        return F.cross_entropy(model(x).float(), y)


def final_loss(way, seed, args):
    """The loss of unseen text, and how far the weights of norms have moved at most."""
    torch.manual_seed(seed)
    model = gpt(args, WORDS, way)
    optimizer = way.make(model.parameters(), args.lr)
    language, generator = Language(), torch.Generator().manual_seed(seed)
    for step in range(args.steps):
        decay = (1 + math.cos(math.pi * step / args.steps)) / 2
        for group in optimizer.param_groups:
            rate = args.lr * min(1.0, (step + 1) / WARM_UP) * decay
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        optimizer.zero_grad()
        loss_of(model, way, *language.text(generator, args.batch)).backward()
        optimizer.step()
    generator = torch.Generator().manual_seed(2**20)
    with torch.no_grad():
        losses = [loss_of(model, way, *language.text(generator, args.batch)).item() for _ in range(40)]
    norms = [m.weight for m in model.modules() if isinstance(m, torch.nn.LayerNorm)]
    return statistics.mean(losses), max((norm.float() - 1).abs().max().item() for norm in norms)


def run_loss(name, way, args, results):
    known = Results(args.results)
    setting = (args.steps, args.width, args.layers, args.batch, args.lr)
    with fast_enough():
        runs = [
            known.get((name, seed, *setting), lambda seed=seed: final_loss(way, seed, args))
            for seed in range(args.seeds)
        ]
    losses, moved = zip(*runs)
    results[name] = losses
    ratios = [100 * (loss / first - 1) for loss, first in zip(losses, results.get("torch, float32", ()))]
    far = f"{statistics.mean(ratios):+.2f}% ({min(ratios):+.2f} to {max(ratios):+.2f})" if ratios else ""
    return f"{statistics.mean(losses):.4f} | {far} | {max(moved):.4f}"


def parts(tensor):
    """The tensors that hold a subclass's data."""
    if hasattr(tensor, "__tensor_flatten__"):
        return [part for name in tensor.__tensor_flatten__()[0] for part in parts(getattr(tensor, name))]
    return [tensor]


def held():
    """Bytes of all live tensors of more than 1,000 elements; each storage counts once."""
    gc.collect()
    storages = {}
    for x in gc.get_objects():
        if isinstance(x, torch.Tensor) and x.numel() > 1000:
            for part in parts(x) + ([] if x.grad is None else parts(x.grad)) if x.is_leaf else parts(x):
                storages[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
    return sum(storages.values())


def run_bytes(name, way, args, results):
    torch.manual_seed(0)
    before = held()
    model = gpt(args, 8192, way)
    params, most, x = list(model.parameters()), 0, torch.randint(8192, (1, 16))
    count = sum(param.numel() for param in params)

    def note(_):
        nonlocal most
        most = max(most, sum(param.grad.nbytes for param in params if param.grad is not None))

    for param in params:
        param.register_post_accumulate_grad_hook(note)
    optimizer = way.make(params, 1e-4)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, way, x, x.flatten()).backward()
        optimizer.step()
    optimizer.zero_grad()
    after = held() - before
    return f"{after / count:.2f} | {(after + most) / count:.2f}"


def run_time(name, way, args, results):
    """Make the optimizer ready to step; `print_times` times all of them in turns."""
    model = gpt(args, 50257, way)
    optimizer = way.make(model.parameters(), 1e-4)
    if not getattr(optimizer, "step_in_backward", False):
        for param in model.parameters():
            param.grad = torch.randn_like(param) * 1e-3
        optimizer.step()
        results[name] = optimizer


def print_times(results, rounds=11):
    """Print a row for each optimizer: the median of its steps, and of their ratio to the float32 step of the same turn."""
    times = {name: [] for name in results}
    for _ in range(rounds):
        for name, optimizer in results.items():
            begin = time.perf_counter()
            optimizer.step()
            times[name].append(time.perf_counter() - begin)
    for name, taken in times.items():
        ratios = [mine / base for mine, base in zip(taken, times.get("torch, float32", ()))]
        against = f"{statistics.median(ratios):.2f}" if ratios else ""
        print(f"| {name} | {1e3 * statistics.median(taken):.1f} ms | {against} |")


COMMANDS = {
    "loss": (run_loss, "loss | against float32 | a norm's weight moved by", dict(width=192, layers=6)),
    "bytes": (run_bytes, "after a step | at the peak of a backward pass", dict(width=768, layers=14)),
    "time": (run_time, "step | against torch's in float32", dict(width=768, layers=12)),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--width", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--results")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=list(WAYS))
    args = parser.parse_args()
    run, columns, sizes = COMMANDS[args.command]
    for name, value in sizes.items():
        setattr(args, name, getattr(args, name) or value)
    torch.set_num_threads(args.threads)
    print(f"| optimizer | {columns} |\n|---{'|---' * (1 + columns.count('|'))}|")
    results = {}
    for name in args.only:
        warnings.simplefilter("ignore")
        try:
            row = run(name, WAYS[name], args, results)
        except (ImportError, RuntimeError, NotImplementedError, AttributeError) as error:
            print(f"| {name} | left out: {str(error).splitlines()[0][:100]} |", flush=True)
            continue
        if row is not None:
            print(f"| {name} | {row} |", flush=True)
    if args.command == "time":
        print_times(results)


if __name__ == "__main__":
    main()
