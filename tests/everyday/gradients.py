"""Scripts that read, change and replace ``p.grad``."""

import contextlib
import copy

import numpy as np
import torch

import ampkit

from . import ALL, learn, learned_by, regression, script, stepped, way_of

# -- what scripts make of gradients


def averaged(run, average, region=contextlib.nullcontext):
    """Keep an average of the gradients: the first ones, moved by ``average(mean, grad)``."""
    averages = {}

    def edit(model):
        with region(), torch.no_grad():
            for p in model.parameters():
                average(averages.setdefault(p, p.grad.clone()), p.grad)

    return stepped(run, edit, times=40) | {"averages": averages.values()}


@script()
def running_average_of_gradients(run):
    return averaged(run, lambda mean, grad: mean.mul_(0.999).add_(grad, alpha=0.001))


@script()
def average_by_lerp_with_casts_off(run):
    return averaged(run, lambda mean, grad: mean.lerp_(grad, 0.01), run.no_casts)


class Centred(torch.optim.Optimizer):
    """An optimizer with state like the gradients: RMSprop with a mean, as people write it."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = p.grad, self.state[p]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(grad), torch.zeros_like(grad)
                state["mean"].mul_(0.99).add_(grad, alpha=0.01)
                state["square"].mul_(0.999).addcmul_(grad, grad, value=0.001)
                p.addcdiv_(state["mean"], state["square"].sqrt().add_(1e-2), value=-group["lr"])


@script(ALL)
def own_optimizer_with_state_like_gradients(run):
    return learned_by(run, Centred, times=30, lr=0.05)


@script()
def lbfgs(run):
    model, optimizer, x, y = regression(make=torch.optim.LBFGS, lr=0.2, max_iter=4)
    way = way_of(model)
    run.begin(model, optimizer, loss_scale=1.0)

    def closure():
        optimizer.zero_grad()
        loss = run.error(model, x, y)
        run.backward(loss, optimizer)
        return loss

    losses = [optimizer.step(closure) for _ in range(3)]
    return {"losses": losses, "weights": way()}


# -- gradients in buckets, and of other models


def in_one_buffer(run, backward):
    """Keep all gradients as views of one buffer, which is cleared and clipped as a whole."""
    model, optimizer, x, y = regression(momentum=0.9, lr=0.05)
    buffer = torch.zeros(sum(p.numel() for p in model.parameters()))

    def losses_of(index):
        parts = buffer.split([p.numel() for p in model.parameters()])
        for p, part in zip(model.parameters(), parts):
            p.grad = part.view_as(p) if index == 0 else p.grad
        buffer.zero_()
        yield run.error(model, x, y)

    def clip():
        norm = buffer.norm()
        buffer.mul_(0.3 / norm.clamp(min=0.3))
        return [norm]

    return learn(run, model, optimizer, losses_of, edit=clip, backward=backward, zero=lambda index: True)


@script()
def gradients_in_one_buffer(run):
    return in_one_buffer(run, run.backward)


@script()
def gradients_in_one_buffer_without_blocks(run):
    return in_one_buffer(run, lambda loss, optimizer: loss.backward())


def handed_over(run, hand_over, set_to_none=True):
    worker, workers_optimizer, x, y = regression()
    shared = copy.deepcopy(worker)
    way, losses = way_of(shared), []
    run.begin(worker, workers_optimizer)
    optimizer = torch.optim.Adam(shared.parameters(), lr=1e-3)
    for _ in range(8):
        worker.load_state_dict(shared.state_dict())
        workers_optimizer.zero_grad(set_to_none=set_to_none)
        losses.append(run.error(worker, x, y))
        run.backward(losses[-1], workers_optimizer)
        for theirs, mine in zip(shared.parameters(), worker.parameters()):
            hand_over(theirs, mine)
        optimizer.step()
    return {"losses": losses, "weights": way()}


@script()
def gradients_handed_over(run):
    return handed_over(run, lambda theirs, mine: setattr(theirs, "grad", mine.grad))


@script()
def gradients_shared_once(run):
    """Share gradients once and zero them in place from then on: both models keep the same gradients."""

    def hand_over(theirs, mine):
        if theirs.grad is None:
            theirs._grad = mine.grad

    return handed_over(run, hand_over, set_to_none=False)


@script()
def gradients_in_lists(run):
    def edit(model):
        grads = [p.grad for p in model.parameters()]
        norms = torch._foreach_norm(grads)
        torch._foreach_mul_(grads, 0.5)
        torch._foreach_add_(grads, [p.detach() for p in model.parameters()], alpha=1e-3)
        torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(grads) * 1.5, grads)
        return norms

    return stepped(run, edit)


# -- gradients that are clipped, and gradients that are looked at


def clipped(run, clip):
    model, optimizer, x, y = regression(momentum=0.9, lr=0.1)
    return learn(run, model, optimizer, lambda _: run.error(model, x, y), edit=lambda: [clip(model, optimizer)])


@script(ALL)
def clipping_by_norm(run):
    return clipped(run, lambda model, optimizer: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3))


@script(ALL)
def clipping_by_norm_of_the_optimizer(run):
    return clipped(run, lambda model, optimizer: ampkit.clip_grad_norm_(optimizer, 0.3))


@script()
def clipping_by_total_norm(run):
    def clip(model, _):
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.3, norm)
        return norm

    return clipped(run, clip)


@script()
def views_of_gradients_by_numpy(run):
    def halve(model):
        for p in model.parameters():
            np.multiply(p.grad.numpy(), 0.5, out=p.grad.numpy())

    return stepped(run, halve)
