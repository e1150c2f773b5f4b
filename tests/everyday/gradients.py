"""What scripts make of ``p.grad``."""

import contextlib
import copy
import threading

import torch
from torch.nn import functional as F

import ampkit

from . import ALL, learned_by, regression, script, stepped, way_of

# -- what scripts make of gradients


@script()
def average_by_lerp_with_casts_off(run):
    average = {}

    def edit(model):
        with run.no_casts(), torch.no_grad():
            for p in model.parameters():
                average.setdefault(p, torch.zeros_like(p)).lerp_(p.grad, 0.01)

    return stepped(run, edit, times=30) | {"averages": average.values()}


@script()
def lbfgs(run):
    model, _, x, y = regression()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=4)
    way, losses = way_of(model), []
    run.begin(model, optimizer, loss_scale=1.0)

    def closure():
        optimizer.zero_grad()
        loss = run.error(model, x, y)
        run.backward(loss, optimizer)
        return loss

    losses += [optimizer.step(closure) for _ in range(3)]
    return {"losses": losses, "weights": way()}


# -- gradients in buckets, and of other models


def in_one_buffer(run, backward):
    """All gradients are views of one buffer, which is cleared and clipped as a whole."""
    model, optimizer, x, y = regression(momentum=0.9, lr=0.05)
    way, losses, begin = way_of(model), [], 0
    run.begin(model, optimizer)
    buffer = torch.zeros(sum(p.numel() for p in model.parameters()))
    for p in model.parameters():
        p.grad = buffer[begin : begin + p.numel()].view_as(p)
        begin += p.numel()
    norms = []
    for _ in range(8):
        buffer.zero_()
        losses.append(run.error(model, x, y))
        backward(losses[-1], optimizer)
        norms.append(buffer.norm())
        buffer.mul_(0.3 / norms[-1].clamp(min=0.3))
        optimizer.step()
    return {"losses": losses, "weights": way(), "norms": norms}


@script()
def gradients_in_one_buffer(run):
    return in_one_buffer(run, run.backward)


@script()
def gradients_in_one_buffer_without_blocks(run):
    return in_one_buffer(run, lambda loss, optimizer: loss.backward())


def handed_over(run, hand_over, set_to_none=True):
    worker, own, x, y = regression()
    shared = copy.deepcopy(worker)
    way, losses = way_of(shared), []
    run.begin(worker, own)
    optimizer = torch.optim.Adam(shared.parameters(), lr=1e-3)
    for _ in range(8):
        worker.load_state_dict(shared.state_dict())
        own.zero_grad(set_to_none=set_to_none)
        losses.append(run.error(worker, x, y))
        run.backward(losses[-1], own)
        for theirs, mine in zip(shared.parameters(), worker.parameters()):
            hand_over(theirs, mine)
        optimizer.step()
    return {"losses": losses, "weights": way()}


@script()
def gradients_handed_over(run):
    def hand_over(theirs, mine):
        theirs.grad = mine.grad

    return handed_over(run, hand_over)


@script()
def gradients_handed_over_by_the_private_name(run):
    def hand_over(theirs, mine):
        theirs._grad = mine.grad

    return handed_over(run, hand_over)


@script()
def gradients_shared_once(run):
    """Zeroed in place from then on: both models keep the same gradients."""

    def hand_over(theirs, mine):
        if theirs.grad is None:
            theirs._grad = mine.grad

    return handed_over(run, hand_over, set_to_none=False)


# -- steps made of gradients


class Projected(torch.optim.Optimizer):
    """GaLore as a class."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                grad, state = p.grad, self.state[p]
                if p.numel() >= 4096:
                    if state.setdefault("step", 0) % 4 == 0:
                        state["basis"] = torch.linalg.svd(grad, full_matrices=False)[0][:, :2]
                    low = state["basis"].t() @ grad
                    state["mean"] = state.setdefault("mean", torch.zeros_like(low)).mul(0.5).add(low, alpha=0.5)
                    state["step"] += 1
                    grad = state["basis"] @ state["mean"]
                p.add_(grad, alpha=-group["lr"])


@script()
def galore_as_a_class(run):
    return learned_by(run, Projected, times=8, rows=96)


def clipped(run, clip):
    model, optimizer, x, y = regression(momentum=0.9, lr=0.1)
    way, losses, norms = way_of(model), [], []
    run.begin(model, optimizer)
    for _ in range(8):
        losses.append(run.error(model, x, y))
        optimizer.zero_grad()
        run.backward(losses[-1], optimizer)
        norms.append(clip(model, optimizer))
        optimizer.step()
    return {"losses": losses, "weights": way(), "norms": norms}


@script(ALL)
def clipping_by_norm(run):
    return clipped(run, lambda model, optimizer: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3))


@script(ALL)
def clipping_by_norm_of_the_optimizer(run):
    return clipped(run, lambda model, optimizer: ampkit.clip_grad_norm_(optimizer, 0.3))


@script()
def clipping_by_total_norm(run):
    def clip(model, optimizer):
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.3, norm)
        return norm

    return clipped(run, clip)


@script()
def clipping_by_value(run):
    def clip(model, optimizer):
        torch.nn.utils.clip_grad_value_(model.parameters(), 5e-3)
        return torch.stack([p.grad.abs().sum() for p in model.parameters()]).sum()

    return clipped(run, clip)


# -- gradients of samples


@script()
def private_sgd_by_vmap(run):
    model, optimizer, x, y = regression(rows=12, lr=0.2)
    way, losses = way_of(model), []
    run.begin(model, optimizer)

    def error(params, row, wanted):
        with run.casts():
            output = torch.func.functional_call(model, params, (row[None],))
        return (output.float() - wanted).square().mean()

    for _ in range(3):
        params = {name: p.detach() for name, p in model.named_parameters()}
        per_sample, errors = torch.func.vmap(torch.func.grad_and_value(error), in_dims=(None, 0, 0))(params, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in per_sample.values()]).norm(dim=0)
        factors = (0.5 / norms).clamp(max=1.0)
        for name, p in model.named_parameters():
            p.grad = (per_sample[name] * factors.view(-1, *[1] * p.ndim)).mean(0)
        optimizer.step()
        losses += [errors, norms]
    return {"losses": losses, "weights": way()}


# -- gradients that are looked at


@script()
def gradients_read_by_four_threads_at_once(run):
    def edit(model):
        norms = [None] * 4

        def look(index):
            norms[index] = sum((p.grad**2).sum() for p in model.parameters())

        threads = [threading.Thread(target=look, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return norms

    return stepped(run, edit)


@script()
def views_of_gradients_by_numpy(run):
    def edit(model):
        for p in model.parameters():
            view = p.grad.numpy()
            view *= 0.5

    return stepped(run, edit)


@script()
def log_of_squares_in_inference_mode(run):
    model, optimizer, x, y = regression(momentum=0.9, lr=0.05)
    way, losses, log = way_of(model), [], []
    run.begin(model, optimizer)
    for index in range(9):
        for part in zip(x.split(16), y.split(16)):
            losses.append(run.error(model, *part))
            run.backward(losses[-1], optimizer)
            if index % 3 == 0:
                with torch.inference_mode():
                    log.append(sum(p.grad.pow(2).sum().item() for p in model.parameters()) ** 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=index % 2 == 0)
    return {"losses": losses, "weights": way(), "log": log}


@script()
def validation_in_inference_mode(run):
    model, optimizer, x, y = regression(momentum=0.9, lr=0.05)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for index in range(8):
        with torch.inference_mode():
            losses.append(run.error(model, x.flip(0), y.flip(0)).clone())
        losses.append(run.error(model, x, y))
        with torch.inference_mode():
            losses.append(run.error(model, x.flip(1), y).clone())
        run.backward(losses[-2], optimizer)
        with torch.inference_mode():
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if index % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=index % 4 == 1)
    return {"losses": losses, "weights": way()}


def closed_on_the_way(run, mode):
    model, optimizer, x, y = regression(momentum=0.9, lr=0.05)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(4):
        losses.append(run.error(model, x, y))
        run.learn(losses[-1], optimizer)
    losses.append(run.error(model, x, y))
    optimizer.zero_grad()
    run.backward(losses[-1], optimizer)
    with mode():
        ampkit.close()
    average = [torch.zeros_like(p).lerp_(p.grad, 0.1) for p in model.parameters()]
    optimizer.step()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    return {"losses": losses, "weights": way(), "averages": average, "gradients": [p.grad for p in model.parameters()]}


@script()
def gradients_read_after_close(run):
    return closed_on_the_way(run, contextlib.nullcontext)


@script(("O5",))  # at O1 and O4 torch puts autocast back when the region ends
def gradients_read_after_close_in_inference_mode(run):
    return closed_on_the_way(run, torch.inference_mode)
