"""Backward passes, hooks, optimizers, and writes to weights."""

import functools
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.nn import functional as F

from . import ALL, FLOAT32_WEIGHTS, SCRIPTS, flat, learn, learned_by, mlp, noise_of, regression, script, stepped, way_of

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


@script()
def sgld(run):
    model, optimizer, x, y = regression(lr=0.05)
    way, noise, losses = way_of(model), noise_of(19), []
    run.begin(model, optimizer)
    for _ in range(10):
        losses.append(run.error(model, x, y))
        run.learn(losses[-1], optimizer)
        for p in model.parameters():
            p.data.add_(noise(*p.shape), alpha=3e-4)
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
    return learn(run, model, optimizer, lambda _: run.error(model, x, y))


class Climbing(torch.optim.Optimizer):
    """SAM as a class around another optimizer, as it goes from repository to repository."""

    def __init__(self, params, base, rho=0.1, **settings):
        super().__init__(params, dict(rho=rho, **settings))
        self.base = base(self.param_groups, **settings)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        norm = torch.norm(torch.stack([p.grad.norm(p=2) for group in self.param_groups for p in group["params"]]), p=2)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad * (group["rho"] / (norm + 1e-12)).to(p))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base.step()
        self.zero_grad()

    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        self.first_step()
        closure()
        self.second_step()


@script()
def sam_as_a_class(run):
    model, _, x, y = regression()
    optimizer = Climbing(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(6):
        losses.append(run.error(model, x, y))
        run.backward(losses[-1], optimizer)
        optimizer.first_step()
        losses.append(run.error(model, x, y))
        run.backward(losses[-1], optimizer)
        optimizer.second_step()
    return {"losses": losses, "weights": way()}


# -- more of torch.autograd


@script()
def product_of_hessian_and_vector(run):
    model, _, x, y = regression()
    run.begin(model)
    params = list(model.parameters())
    vector = [noise_of(29)(*p.shape) for p in params]
    losses, products = [], []
    for _ in range(3):
        losses.append(run.error(model, x, y))
        slopes = torch.autograd.grad(losses[-1], params, create_graph=True)
        inner = sum((slope * v).sum() for slope, v in zip(slopes, vector))
        products = torch.autograd.grad(inner, params)
        norm = torch.stack([each.norm() for each in products]).norm()
        vector = [each / norm for each in products]
    return {"losses": losses, "gradients": slopes, "products": products}


@script()
def product_of_hessian_and_vector_by_backward(run):
    """Take products as `hutchinson` estimates do: backward with a graph, then of the gradients."""
    model, _, x, y = regression()
    run.begin(model)
    params = list(model.parameters())
    run.error(model, x, y).backward(create_graph=True)
    slopes = [p.grad for p in params]
    vector = [noise_of(30)(*p.shape).sign() for p in params]
    products = torch.autograd.grad(slopes, params, grad_outputs=vector)
    first = flat(slopes)
    for p in params:
        p.grad = None
    return {"gradients": [first], "products": products}


@script()
def gradients_of_autograd_grad_assigned(run):
    model, optimizer, x, y = regression()
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(8):
        losses.append(run.error(model, x, y))
        for p, slope in zip(model.parameters(), torch.autograd.grad(losses[-1], list(model.parameters()))):
            p.grad = slope
        optimizer.step()
    return {"losses": losses, "weights": way()}


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
def one_loss_goes_backward_twice(run):
    model, optimizer, x, y = regression(lr=0.05)
    run.begin(model, optimizer)
    loss = run.error(model, x, y)
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    twice = flat(p.grad for p in model.parameters())
    loss.backward()
    return {"twice": [twice], "thrice": [p.grad for p in model.parameters()]}


def kept_alias(run, backward):
    """Keep aliases of ``p.grad``, which show what the next backward passes add."""
    model, optimizer, x, y = regression(lr=0.05)
    run.begin(model, optimizer)
    parts = list(zip(x.split(8), y.split(8)))
    backward(run.error(model, *parts[0]), optimizer)
    aliases = [p.grad for p in model.parameters()]
    first = flat(aliases)
    for part in parts[1:]:
        backward(run.error(model, *part), optimizer)
    return {"first": [first], "aliases": aliases, "gradients": [p.grad for p in model.parameters()]}


@script()
def alias_kept_over_a_second_backward(run):
    return kept_alias(run, lambda loss, optimizer: loss.backward())


@script()
def alias_kept_over_a_second_block(run):
    return kept_alias(run, run.backward)


def penalized(run, backward, where):
    """Add a penalty on the weights themselves to one of four micro-batches."""
    model, optimizer, x, y = regression(momentum=0.9, lr=0.05)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(6):
        optimizer.zero_grad()
        for index, part in enumerate(zip(x.split(8), y.split(8))):
            loss = run.error(model, *part) / 4
            if index == where:
                loss = loss + 0.02 * sum((p**2).sum() for p in model.parameters())
            backward(loss, optimizer)
            losses.append(loss)
        optimizer.step()
    return {"losses": losses, "weights": way(), "gradients": [p.grad for p in model.parameters()]}


@script()
def penalty_in_the_first_micro_batch(run):
    return penalized(run, run.backward, 0)


@script()
def penalty_in_the_third_micro_batch(run):
    return penalized(run, run.backward, 2)


@script()
def penalty_in_the_third_micro_batch_without_blocks(run):
    return penalized(run, lambda loss, optimizer: loss.backward(), 2)


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
def layer_used_many_times(run):
    """Use a layer 200 times in one graph."""
    torch.manual_seed(31)
    model = nn.Sequential(nn.Linear(96, 96), nn.Tanh())
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), noise_of(32)(200, 4, 96) + 1
    run.begin(model, optimizer)
    total = 0.0
    for part in x:
        with run.casts():
            total = total + (model(part).float() - 1).square().mean()
    run.backward(total, optimizer)
    return {"losses": [total], "gradients": [p.grad for p in model.parameters()]}


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


@script()
def backward_to_some_inputs(run):
    model, optimizer, x, y = regression(lr=0.05)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for index in range(8):
        losses.append(run.error(model, x, y))
        optimizer.zero_grad()
        with run.block(losses[-1], optimizer) as scaled:
            scaled.backward(inputs=list(model[index % 2 * 2].parameters()), retain_graph=True)
        run.backward(losses[-1] / 2, optimizer)
        optimizer.step()
    return {"losses": losses, "weights": way(), "gradients": [p.grad for p in model.parameters()]}


@script()
def anomalies_looked_for(run):
    model, optimizer, x, y = regression(lr=0.05)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for index in range(6):
        with torch.autograd.set_detect_anomaly(index % 2 == 1):
            for part in zip(x.split(16), y.split(16)):
                losses.append(run.error(model, *part))
                run.backward(losses[-1], optimizer)
        optimizer.step()
        optimizer.zero_grad(set_to_none=index % 3 == 0)
    return {"losses": losses, "weights": way()}


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
    """Mask matrices and biases, in float32."""
    model, optimizer, x, y = regression()
    for p in model.parameters():
        mask = (torch.arange(p.numel()) % 3 > 0).view_as(p).float()
        p.register_hook(lambda grad, mask=mask: grad * mask)
    return learn(run, model, optimizer, lambda _: run.error(model, x, y))


@script()
def hook_that_comes_and_goes(run):
    model, optimizer, x, y = regression()
    seen, losses, way = [], [], way_of(model)
    run.begin(model, optimizer, loss_scale=1.0)
    for index in range(9):
        losses.append(run.error(model, x, y))
        handles = []
        if index % 3 == 1:
            for p in model.parameters():
                handles.append(p.register_hook(lambda grad: seen.append(grad.clone()) or grad * 0.5))
        run.learn(losses[-1], optimizer)
        for handle in handles:
            handle.remove()
    return {"losses": losses, "weights": way(), "seen": sorted(seen, key=torch.numel)}


@script()
def hook_put_on_between_passes_over_one_graph(run):
    model, optimizer, x, y = regression()
    run.begin(model, optimizer)
    loss = run.error(model, x, y)
    loss.backward(retain_graph=True)
    for p in model.parameters():
        p.register_hook(lambda grad: 1e-3 * grad)
    for _ in range(60):
        loss.backward(retain_graph=True)
    return {"gradients": [p.grad for p in model.parameters()]}


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
    """Hook the accumulators of gradients, as distributed optimizers do."""
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


@script()
def hooks_after_accumulation(run):
    model, optimizer, x, y = regression()
    average = {}

    def hook(p):
        average.setdefault(p, torch.zeros_like(p)).lerp_(p.grad, 0.01)
        p.grad.clamp_(-0.01, 0.01)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    found = learn(run, model, optimizer, lambda _: run.error(model, x, y), times=12, loss_scale=1.0)
    return found | {"averages": [average[p] for p in model.parameters()]}


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
    """Initialize the model alone."""
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
    way, losses = way_of(model), []
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

for kind, when, whose in itertools.product(ADAMW, ("before", "after"), ("the same model", "another model")):
    name = f"adamw {kind} made {when} over {whose}"
    SCRIPTS[name] = functools.partial(adamw, settings=ADAMW[kind], when=when, whose=whose), FLOAT32_WEIGHTS

for kind, settings in ADAMW.items():
    SCRIPTS[f"adamw {kind} given"] = functools.partial(learned_by, make=torch.optim.AdamW, lr=2e-3, **settings), ALL


@script()
def adafactor(run):
    return learned_by(run, torch.optim.Adafactor, lr=5e-3)


@script()
def grad_scaler_that_is_off(run):
    model, optimizer, x, y = regression(momentum=0.9, lr=0.05)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(8):
        losses.append(run.error(model, x, y))
        optimizer.zero_grad()
        run.backward(scaler.scale(losses[-1]), optimizer)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return {"losses": losses, "weights": way()}


@script()
def asam(run):
    model, optimizer, x, y = regression(momentum=0.9, lr=0.05)
    way, losses, state = way_of(model), [], {}
    run.begin(model, optimizer)
    for _ in range(6):
        losses.append(run.error(model, x, y))
        run.backward(losses[-1], optimizer)
        with torch.no_grad():
            scales = [p.detach().abs().add_(0.01) for p in model.parameters()]
            for p, scale in zip(model.parameters(), scales):
                p.grad.mul_(scale)
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm() + 1e-16
            for p, scale in zip(model.parameters(), scales):
                state[p] = p.grad.mul_(scale).mul_(0.3 / norm)
                p.add_(state[p])
        optimizer.zero_grad()
        losses.append(run.error(model, x, y))
        run.backward(losses[-1], optimizer)
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(state[p])
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "weights": way()}
