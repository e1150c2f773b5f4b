"""The part of a step after the backward pass, with FusedAdam at O2, beside that of torch.autocast.

    python benchmarks/bench_optimizer_step.py [--rounds 20] [--device cpu] [--dtype bfloat16] [--small]

First the part after backward alone (exit of `scale_loss`, clipping, step) on the 148 tensors of GPT-2 small, against
GradScaler, torch.nn.utils.clip_grad_norm_ and torch.optim.AdamW(fused=True) on float32 gradients; "O2, int8" keeps moments in 8
bits. Each element moves 48 bytes with autocast and clipping (8 to unscale, 4 and 8 to measure and clip, 28 for the step), 32 at O2
(4, 2 and 26: gradient 2, weight and rest 4 each way, moments 8 each way) and 28 at a loss scale of 1: ratios of 0.67
and 0.58, where memory is all that counts. In float16 the gradient becomes float32, and O2 moves 38 (6, 4 and 28).

Then, in bfloat16, whole steps of six Linear(2048, 2048) with a batch of 8 and four micro-batches, against torch.autocast; "bare"
is the floor, forward and backward passes of the same layers in lower precision, without an optimizer. All contenders take
turns, round after round, and medians are printed: what else the machine does hits all alike. Freed memory stays
with the process (memory.py).
"""

import argparse
import functools
import logging
import statistics
import time

import torch
import torch.nn.functional as F
from host_reads import count_reads
from memory import keep_freed_memory
from torch import nn

import ampkit
from ampkit.models.float32_values import stored_weights
from ampkit.optimizers import FusedAdam

SETTINGS = dict(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
WARM_UP = 3


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", help="lower precision (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="a hundredth of the size, to see that it runs")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    keep_freed_memory()
    # Gradients are written inside of the blocks here, and not by a backward pass, of which ampkit warns.
    logging.getLogger("ampkit").setLevel(logging.ERROR)

    print(f"{ampkit.kernels.implementation()}")
    contenders = {"autocast": Autocast(args.device, args.small)}
    contenders["O2"] = Ours(args.device, dtype, args.small)
    if dtype is torch.bfloat16:
        contenders["O2, scale 1"] = Ours(args.device, dtype, args.small, loss_scale=1.0)
        contenders["O2, int8"] = Ours(args.device, dtype, args.small, state_dtype="int8", loss_scale=1.0)
    first = contenders["autocast"]
    print(f"After backward: {len(first.params)} tensors, {first.elements / 1e6:.1f} M parameters on {args.device}")
    print(f"{'contender':<12}{'clipping':>10}{'ms':>9}{'ratio':>8}{'bytes each':>12}{'host reads':>12}")
    for clips in (True, False):
        runs = {name: functools.partial(contender.run, clips) for name, contender in contenders.items()}
        times = interleaved(runs, args.rounds)
        for name, contender in contenders.items():
            print(f"{name:<12}{'yes' if clips else 'no':>10}{times[name] * 1e3:>9.2f}", end="")
            print(f"{times[name] / times['autocast']:>8.2f}{contender.bytes_each():>12.1f}", end="")
            print(f"{count_reads(runs[name], args.device):>12}")
    del contenders, first, contender, runs
    ampkit.close()
    if dtype is not torch.bfloat16:
        return

    steps = {
        "autocast": autocast_steps(args.device, dtype, args.small),
        "O5, delay_unscale": our_steps(args.device, dtype, args.small, delays=True),
        "O5, in float32": our_steps(args.device, dtype, args.small, delays=False),
        "bare": bare_passes(args.device, dtype, args.small),
    }
    times = interleaved(steps, args.rounds)
    print(
        "Whole steps: 6 x Linear(2048, 2048), batch 8, 4 micro-batches, which add up with delay_unscale or in float32"
    )
    for name, seconds in times.items():
        print(f"{name:<22}{seconds * 1e3:>9.2f}{seconds / times['autocast']:>8.2f}")


class Gpt2(nn.Module):
    """The parameters of GPT-2 small: 148 tensors, 124 M elements. It computes nothing here."""

    def __init__(self, width=768, layers=12, vocabulary=50257, length=1024):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                [
                    nn.LayerNorm(width),
                    nn.Linear(width, 3 * width),
                    nn.Linear(width, width),
                    nn.LayerNorm(width),
                    nn.Linear(width, 4 * width),
                    nn.Linear(4 * width, width),
                ]
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self):  # what has none is no model for initialize
        raise NotImplementedError


def gpt2(device, small):
    torch.manual_seed(0)
    return (Gpt2(64, 12, 5000, 128) if small else Gpt2()).to(device)


class Contender:
    """A model, an optimizer, and gradients that stand there as a backward pass would have left them."""

    def prepare(self, model, optimizer, scale):
        self.params, self.optimizer = list(model.parameters()), optimizer
        self.elements = sum(p.numel() for p in self.params)
        self.sources = [torch.randn_like(p) * (1e-3 * scale) for p in self.params]
        self.grads = [torch.empty_like(p) for p in self.params]
        self.loss = torch.ones((), device=self.params[0].device, requires_grad=True)

    def backward(self):
        torch._foreach_copy_(self.grads, self.sources)
        for param, gradient in zip(self.params, self.grads):
            param.grad = gradient

    def clear(self):
        self.optimizer.zero_grad(set_to_none=True)
        for param in self.params:
            param.grad = None

    def bytes_each(self):
        self.run(True, clears=False)
        tensors = [*self.params, *(p.grad for p in self.params), *self.rests()]
        tensors += [t for s in self.optimizer.state.values() for t in s.values() if t.dim()]
        self.clear()
        return sum(t.untyped_storage().nbytes() for t in tensors) / self.elements

    def rests(self):
        """The tensors that together with the weights are float32 values."""
        return []


class Autocast(Contender):
    """Float32 weights and gradients, GradScaler, torch's fused AdamW."""

    def __init__(self, device, small):
        model = gpt2(device, small)
        self.scaler = torch.amp.GradScaler(torch.device(device).type)
        self.prepare(model, torch.optim.AdamW(model.parameters(), fused=True, **SETTINGS), self.scaler.get_scale())

    def run(self, clips, clears=True):
        self.scaler.scale(self.loss)
        self.backward()
        synchronize(self.loss.device)
        start = time.perf_counter()
        if clips:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        synchronize(self.loss.device)
        seconds = time.perf_counter() - start
        if clears:
            self.clear()
        return seconds


class Ours(Contender):
    """Lower-precision weights with rests, FusedAdam."""

    def __init__(self, device, dtype, small, state_dtype="float32", loss_scale=None):
        model = gpt2(device, small)
        optimizer = FusedAdam(model.parameters(), state_dtype=state_dtype, **SETTINGS)
        settings = dict(opt_level="O2", cast_model_type=dtype, loss_scale=loss_scale, verbosity=0)
        model, optimizer = ampkit.initialize(model, optimizer, **settings)
        self.model = model
        self.prepare(model, optimizer, ampkit.current_session().scaling.scaler(0).loss_scale)

    def run(self, clips, clears=True):
        with ampkit.scale_loss(self.loss, self.optimizer):
            self.backward()
            synchronize(self.loss.device)
            start = time.perf_counter()
        if clips:
            ampkit.clip_grad_norm_(self.optimizer, 1.0)
        self.optimizer.step()
        synchronize(self.loss.device)
        seconds = time.perf_counter() - start
        if clears:
            self.clear()
        return seconds

    def rests(self):
        return [entry.rest for _, entry in stored_weights(self.model) if entry.rest is not None]


def linears(device, small):
    torch.manual_seed(0)
    width = 128 if small else 2048
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(6))).to(device)
    return model, torch.randn(4, 8, width, device=device), torch.randn(4, 8, width, device=device)


def autocast_steps(device, dtype, small):
    model, xs, ys = linears(device, small)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **SETTINGS)

    def run():
        synchronize(device)
        start = time.perf_counter()
        for x, y in zip(xs, ys):
            with torch.autocast(torch.device(device).type, dtype):
                loss = F.mse_loss(model(x).float(), y) / 4
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)
        return time.perf_counter() - start

    return run


def our_steps(device, dtype, small, delays):
    model, xs, ys = linears(device, small)
    optimizer = FusedAdam(model.parameters(), **SETTINGS)
    model, optimizer = ampkit.initialize(model, optimizer, opt_level="O5", verbosity=0)

    def run():
        synchronize(device)
        start = time.perf_counter()
        for index, (x, y) in enumerate(zip(xs, ys)):
            loss = F.mse_loss(model(x).float(), y) / 4
            with ampkit.scale_loss(loss, optimizer, delay_unscale=delays and index < 3) as scaled:
                scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)
        return time.perf_counter() - start

    return run


def bare_passes(device, dtype, small):
    model, xs, ys = linears(device, small)
    model.to(dtype)

    def run():
        synchronize(device)
        start = time.perf_counter()
        for x, y in zip(xs.to(dtype), ys):
            F.mse_loss(model(x).float(), y).backward()
            model.zero_grad()
        synchronize(device)
        return time.perf_counter() - start

    return run


def interleaved(runs, rounds):
    """Median seconds of each run, in turns; a run returns its own time."""
    times = {name: [] for name in runs}
    for index in range(WARM_UP + rounds):
        for name, run in runs.items():
            seconds = run()
            if index >= WARM_UP:
                times[name].append(seconds)
    return {name: statistics.median(values) for name, values in times.items()}


def synchronize(device):
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
