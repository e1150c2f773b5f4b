"""Backward passes, hooks, optimizers, and writes to weights."""

import functools
import itertools
import threading

import torch
from torch import nn
from torch.nn import functional as F

from . import ALL, FLOAT32_WEIGHTS, SCRIPTS, flat, learned_by, mlp, noise_of, regression, script, stepped, way_of

# -- loops that write weights between two forwards


@script()
def sam(run):
    model, optimizer, x, y = regression(momentum=0.9, lr=0.05)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(6):
        losses.append(run.error(model, x, y))
        optimizer.zero_grad()
        run.backward(losses[-1], optimizer)
        with torch.no_grad():
            norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in model.parameters()]), p=2)
            before = [p.data.clone() for p in model.parameters()]
            for p in model.parameters():
                p.add_(p.grad * (0.1 / (norm + 1e-12)).to(p))
        losses.append(run.error(model, x, y))
        optimizer.zero_grad()
        run.backward(losses[-1], optimizer)
        for p, values in zip(model.parameters(), before):
            p.data = values
        optimizer.step()
    return {"losses": losses, "weights": way()}


class Adapted(nn.Module):
    """Low-rank adapters over a frozen layer."""

    def __init__(self, base, rank=48):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


@script(ALL)
def low_rank_adapters_over_a_frozen_base(run):
    base = mlp(64, 96, 96, 2)
    model = nn.Sequential(*(Adapted(layer) if isinstance(layer, nn.Linear) else layer for layer in base))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    _, _, x, y = regression()
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(8):
        losses.append(run.error(model, x, y))
        run.learn(losses[-1], optimizer)
    return {"losses": losses, "weights": way()}


# -- more of torch.autograd


@script()
def product_of_hessian_and_vector(run):
    model, _, x, y = regression()
    run.begin(model)
    params = list(model.parameters())
    vector = [noise_of(29)(*p.shape) for p in params]
    losses, found = [], []
    for _ in range(3):
        losses.append(run.error(model, x, y))
        slopes = torch.autograd.grad(losses[-1], params, create_graph=True)
        inner = sum((slope * v).sum() for slope, v in zip(slopes, vector))
        found = torch.autograd.grad(inner, params)
        norm = torch.stack([each.norm() for each in found]).norm()
        vector = [each / norm for each in found]
    return {"losses": losses, "gradients": slopes, "products": found}


@script()
def gradnorm_of_two_tasks(run):
    model, optimizer, x, y = regression()
    shares = nn.Parameter(torch.ones(2))
    of_shares = torch.optim.SGD([shares], lr=0.05)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(6):
        with run.casts():
            output = model(x)
        tasks = torch.stack([F.mse_loss(output[:, index].float(), 3 * index + y[:, index]) for index in range(2)])
        norms = torch.stack(
            [
                torch.autograd.grad(share * task, model[0].weight, retain_graph=True, create_graph=True)[0].norm()
                for share, task in zip(shares, tasks)
            ]
        )
        (shares.grad,) = torch.autograd.grad((norms - norms.mean().detach()).abs().sum(), shares, retain_graph=True)
        losses += [tasks, norms]
        run.learn((shares.detach() * tasks).sum(), optimizer)
        of_shares.step()
    return {"losses": losses, "weights": way(), "shares": [shares]}


def two_losses(run, model, x, y):
    with run.casts():
        output = model(x)
    return F.mse_loss(output.float(), y), (output.float() - y).abs().mean()


@script(ALL)
def backward_of_several_losses(run):
    model, optimizer, x, y = regression(lr=0.05)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(8):
        losses += two_losses(run, model, x, y)
        optimizer.zero_grad()
        torch.autograd.backward(losses[-2:], [torch.tensor(1.0), torch.tensor(0.5)])
        optimizer.step()
    return {"losses": losses, "weights": way()}


@script(ALL)
def one_graph_goes_backward_twice(run):
    model, optimizer, x, y = regression(lr=0.05)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(8):
        losses += two_losses(run, model, x, y)
        optimizer.zero_grad()
        for loss, flag in zip(losses[-2:], (True, False)):
            with run.block(loss, optimizer) as scaled:
                scaled.backward(retain_graph=flag)
        optimizer.step()
    return {"losses": losses, "weights": way()}


@script()
def alias_kept_over_a_second_block(run):
    """Who keeps ``p.grad`` sees what the next backward passes add."""
    model, optimizer, x, y = regression(lr=0.05)
    run.begin(model, optimizer)
    parts = list(zip(x.split(8), y.split(8)))
    run.backward(run.error(model, *parts[0]), optimizer)
    aliases = [p.grad for p in model.parameters()]
    first = flat(aliases)
    for part in parts[1:]:
        run.backward(run.error(model, *part), optimizer)
    return {"first": [first], "aliases": aliases, "gradients": [p.grad for p in model.parameters()]}


@script()
def penalty_in_the_third_micro_batch(run):
    """One of four micro-batches has a penalty on the weights themselves."""
    model, optimizer, x, y = regression(momentum=0.9, lr=0.05)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(6):
        optimizer.zero_grad()
        for index, part in enumerate(zip(x.split(8), y.split(8))):
            loss = run.error(model, *part) / 4
            if index == 2:
                loss = loss + 0.02 * sum((p**2).sum() for p in model.parameters())
            run.backward(loss, optimizer)
            losses.append(loss)
        optimizer.step()
    return {"losses": losses, "weights": way(), "gradients": [p.grad for p in model.parameters()]}


@script()
def two_threads_go_backward_at_once(run):
    model, _, x, y = regression(rows=96)
    run.begin(model)
    losses = [run.error(model, *part) for part in zip(x.split(4), y.split(4))]

    def work(mine):
        for loss in mine:
            loss.backward()

    threads = [threading.Thread(target=work, args=(losses[index::2],)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"gradients": [p.grad for p in model.parameters()]}


# -- hooks, and gradients that a script puts in or takes out


@script()
def gradients_taken_out_and_put_in(run):
    times = itertools.count()

    def edit(model):
        params, kept, way = list(model.parameters()), [p.grad for p in model.parameters()], next(times) % 4
        for p in params:
            p.grad = None
        for p, grad in zip(params, kept):
            if way == 0:
                p.grad = grad
            elif way == 1:
                p.grad = grad.clone()
            elif way == 2:
                del p.grad
                p.grad = (grad.double() / grad.double().norm() / 10).to(p.dtype)

    return stepped(run, edit, times=11)


@script(ALL)
def masks_by_hooks_before_initialize(run):
    """On matrices and biases, in float32."""
    model, optimizer, x, y = regression()
    for p in model.parameters():
        mask = (torch.arange(p.numel()) % 3 > 0).view_as(p).float()
        p.register_hook(lambda grad, mask=mask: grad * mask)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(8):
        losses.append(run.error(model, x, y))
        run.learn(losses[-1], optimizer)
    return {"losses": losses, "weights": way()}


class Halves(torch.autograd.Function):
    """A product with one of two weights: the other gets no gradient."""

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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(6):
        optimizer.zero_grad()
        for index, part in enumerate(zip(x.split(16), y.split(16))):
            with run.casts():
                output = model[2](torch.tanh(Halves.apply(part[0], model[0].weight, model[1].weight, index)))
            losses.append(F.mse_loss(output.float(), part[1]))
            run.backward(losses[-1], optimizer)
        optimizer.step()
    return {"losses": losses, "weights": way()}


@script()
def hooks_of_accumulators(run):
    """As distributed optimizers have them."""
    model, optimizer, x, y = regression(lr=0.05)
    accumulators, losses, way = [], [], way_of(model)
    run.begin(model, optimizer, loss_scale=1.0)
    average = {p: torch.zeros_like(p) for p in model.parameters()}

    def look(p, *_):
        average[p].lerp_(p.grad, 0.01)

    for p in model.parameters():
        accumulators.append(p.expand_as(p).grad_fn.next_functions[0][0])
        accumulators[-1].register_hook(functools.partial(look, p))
    for _ in range(10):
        losses.append(run.error(model, x, y))
        run.learn(losses[-1], optimizer)
    return {"losses": losses, "weights": way(), "averages": average.values()}


@script(("O4", "O5"))
def steps_in_hooks(run):
    model, _, x, y = regression()
    optimizers = {p: torch.optim.Adam([p], lr=1e-3) for p in model.parameters()}
    losses, way = [], way_of(model)
    run.begin(model, list(optimizers.values()))

    def hook(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    for _ in range(8):
        losses.append(run.error(model, x, y))
        run.backward(losses[-1], list(optimizers.values()))
    return {"losses": losses, "weights": way()}


@script(("O4", "O5"))
def steps_in_hooks_without_initialize(run):
    """The model alone is given to initialize."""
    model, _, x, y = regression()
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}
    losses, way = [], way_of(model)
    run.begin(model)

    def hook(p):
        optimizers[p].step()
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    for _ in range(8):
        losses.append(run.error(model, x, y))
        losses[-1].backward()
    return {"losses": losses, "weights": way()}


# -- optimizers of torch, given to initialize or not


def adamw(run, settings, when, whose):
    model, _, x, y = regression()
    other = mlp(4, 2)
    way, losses, optimizer = way_of(model), [], None
    if when == "before":
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, **settings)
    if whose == "the same model":
        run.begin(model)
    else:
        run.begin(other, torch.optim.SGD(other.parameters(), lr=0.1))
    if when == "after":
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, **settings)
    for _ in range(8):
        losses.append(run.error(model, x, y))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    return {"losses": losses, "weights": way()}


ADAMW = {"foreach": {"foreach": True}, "fused": {"fused": True}, "one by one": {"foreach": False}}

MADE = (
    ("foreach", "before", "another model"),
    ("fused", "before", "the same model"),
    ("fused", "after", "another model"),
    ("one by one", "after", "the same model"),
)

for kind, when, whose in MADE:
    name = f"adamw {kind} made {when} over {whose}"
    SCRIPTS[name] = functools.partial(adamw, settings=ADAMW[kind], when=when, whose=whose), FLOAT32_WEIGHTS

for kind, settings in ADAMW.items():
    SCRIPTS[f"adamw {kind} given"] = functools.partial(learned_by, make=torch.optim.AdamW, lr=2e-3, **settings), ALL


@script()
def adafactor(run):
    return learned_by(run, torch.optim.Adafactor, lr=5e-3)
