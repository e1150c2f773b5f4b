"""Backward passes, hooks, optimizers, and writes to weights."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.nn import functional as F

from . import ALL, SCRIPTS, learn, learned_by, mlp, noise_of, regression, script, stepped, way_of

# -- loops that write weights between two forwards


@script()
def sgld(run):
    noise = noise_of(19)

    def edit(model):
        for p in model.parameters():
            p.data.add_(noise(*p.shape), alpha=3e-4)

    return stepped(run, edit, times=10, momentum=0.0)


# -- more of torch.autograd


@script()
def long_accumulation(run):
    """Accumulate a sum of 200 terms, of which bfloat16 would lose the last ones."""
    model, optimizer, x, y = regression()
    run.begin(model, optimizer)
    for index in range(200):
        loss = run.error(model, x[index % 4 :: 4], y[index % 4 :: 4] + 1)
        loss.backward()
    return {"gradients": [p.grad for p in model.parameters()]}


@script()
def two_threads_go_backward_at_once(run):
    model, _, x, y = regression(rows=96)
    run.begin(model)
    losses = [run.error(model, *part) for part in zip(x.split(4), y.split(4))]
    start = threading.Barrier(2)

    def work(mine):
        start.wait()
        for loss in mine:
            loss.backward()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (losses[::2], losses[1::2])))
    return {"gradients": [p.grad for p in model.parameters()]}


# -- hooks, and gradients that a script puts in or takes out


@script(ALL)
def masks_by_hooks_before_initialize(run):
    """Mask matrices and biases, in float32."""
    model, optimizer, x, y = regression()
    for p in model.parameters():
        mask = (torch.arange(p.numel()) % 3 > 0).view_as(p).float()
        p.register_hook(lambda grad, mask=mask: grad * mask)
    return learn(run, model, optimizer, lambda _: run.error(model, x, y))


class Halves(torch.autograd.Function):
    """A product with one of two weights: the other weight gets no gradient."""

    @staticmethod
    def forward(ctx, x, one, other, index):
        ctx.save_for_backward(x, (one, other)[index])
        ctx.index = index
        return x @ (one, other)[index].t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad.to(x.dtype)
        slope = grad.t() @ x
        return grad @ weight, *((slope, None) if ctx.index == 0 else (None, slope)), None


@script(ALL)
def function_that_leaves_a_weight_out(run):
    _, _, x, y = regression()
    model = nn.ModuleList([nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False), mlp(96, 2)])

    def losses_of(_):
        for index, (part, wanted) in enumerate(zip(x.split(16), y.split(16))):
            with run.casts():
                output = model[2](torch.tanh(Halves.apply(part, model[0].weight, model[1].weight, index)))
            yield F.mse_loss(output.float(), wanted)

    return learn(run, model, torch.optim.SGD(model.parameters(), lr=0.1), losses_of, times=6)


def stepped_in_hooks(run, make, initializes):
    """Step in hooks, with an optimizer for each parameter, which is passed to initialize or not."""
    model, _, x, y = regression()
    optimizers = {p: make([p]) for p in model.parameters()}
    losses, way = [], way_of(model)
    run.begin(model, list(optimizers.values()) if initializes else None)

    def hook(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    for _ in range(8):
        losses.append(run.error(model, x, y))
        if initializes:
            run.backward(losses[-1], list(optimizers.values()))
        else:
            losses[-1].backward()
    return {"losses": losses, "weights": way()}


@script(("O4", "O5"))
def steps_in_hooks(run):
    return stepped_in_hooks(run, lambda params: torch.optim.Adam(params, lr=1e-3), initializes=True)


@script(("O4", "O5"))
def steps_in_hooks_without_initialize(run):
    return stepped_in_hooks(run, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), initializes=False)


# -- optimizers of torch


ADAMW = {"foreach": {"foreach": True}, "fused": {"fused": True}, "one by one": {"foreach": False}}

for kind, settings in ADAMW.items():
    SCRIPTS[f"adamw {kind} given"] = functools.partial(learned_by, make=torch.optim.AdamW, lr=2e-3, **settings), ALL


@script()
def adafactor(run):
    return learned_by(run, torch.optim.Adafactor, lr=5e-3)
