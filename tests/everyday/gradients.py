"""Scripts that read, change and replace ``p.grad``."""

import contextlib
import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.nn import functional as F

import ampkit

from . import ALL, learn, learned_by, mlp, noise_of, regression, script, stepped, way_of

# -- what scripts make of gradients


@script()
def running_average_of_gradients(run):
    model, optimizer, x, y = regression(lr=0.02)
    run.begin(model, optimizer)
    average = None
    for _ in range(80):
        gradients = run.gradients(run.error(model, x, y), model, optimizer)
        if average is None:
            average = [gradient.clone() for gradient in gradients]
        for mean, p in zip(average, model.parameters()):
            mean.mul_(0.999).add_(p.grad, alpha=0.001)
        optimizer.step()
    return {"averages": average}


@script()
def average_by_lerp_with_casts_off(run):
    average = {}

    def edit(model):
        with run.no_casts(), torch.no_grad():
            for p in model.parameters():
                average.setdefault(p, torch.zeros_like(p)).lerp_(p.grad, 0.01)

    return stepped(run, edit, times=30) | {"averages": average.values()}


@script()
def svrg(run):
    model, optimizer, x, y = regression()
    snapshot = copy.deepcopy(model)
    of_snapshot = torch.optim.SGD(snapshot.parameters(), lr=0.1)
    way, losses = way_of(model), []
    run.begin([model, snapshot], [optimizer, of_snapshot])
    for _ in range(2):
        snapshot.load_state_dict(model.state_dict())
        full = [g.clone() for g in run.gradients(run.error(snapshot, x, y), snapshot, of_snapshot)]
        for part, wanted in zip(x.split(8), y.split(8)):
            run.gradients(run.error(snapshot, part, wanted), snapshot, of_snapshot)
            losses.append(run.error(model, part, wanted))
            run.gradients(losses[-1], model, optimizer)
            for p, old, mean in zip(model.parameters(), snapshot.parameters(), full):
                p.grad.data.sub_(old.grad.data).add_(mean)
            optimizer.step()
    return {"losses": losses, "weights": way()}


@script()
def momentum_by_hand(run):
    model, _, x, y = regression()
    way, losses, velocity = way_of(model), [], {}
    run.begin(model)
    for _ in range(15):
        model.zero_grad()
        losses.append(run.error(model, x, y))
        losses[-1].backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                velocity[name] = 0.9 * velocity.get(name, 0.0) + p.grad
                p -= 0.02 * velocity[name]
    return {"losses": losses, "weights": way(), "velocity": velocity.values()}


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


class WatchingSGD(torch.optim.SGD):
    """An optimizer that adds to torch's step: a slow average of gradients, amplified."""

    @torch.no_grad()
    def step(self, closure=None):
        self.averages = getattr(self, "averages", {})
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.averages.setdefault(p, torch.zeros_like(p.grad))
                mean.lerp_(p.grad, 0.01)
                p.grad.add_(mean, alpha=2.0)
        return super().step(closure)


@script()
def subclass_that_adds_to_the_step(run):
    return learned_by(run, WatchingSGD, times=20, lr=0.05)


@script()
def hooks_before_and_after_the_step(run):
    model, optimizer, x, y = regression()
    average, norms = {}, []

    def before(optimizer, args, kwargs):
        for p in model.parameters():
            average.setdefault(p, torch.zeros_like(p)).lerp_(p.grad, 0.01)
            p.grad.mul_(0.9)

    def after(optimizer, args, kwargs):
        norms.append(torch.stack([p.grad.square().sum() for p in model.parameters()]).sum())

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    found = learn(run, model, optimizer, lambda _: run.error(model, x, y), times=15)
    return found | {"averages": average.values(), "norms": norms}


@script()
def closure_that_looks_at_gradients(run):
    model, optimizer, x, y = regression(momentum=0.9, lr=0.05)
    way, average = way_of(model), {}
    run.begin(model, optimizer)

    def closure():
        optimizer.zero_grad()
        loss = run.error(model, x, y)
        run.backward(loss, optimizer)
        for p in model.parameters():
            average.setdefault(p, torch.zeros_like(p)).lerp_(p.grad, 0.01)
            p.grad.add_(average[p], alpha=2.0)
        return loss

    losses = [optimizer.step(closure) for _ in range(12)]
    return {"losses": losses, "weights": way(), "averages": average.values()}


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
    """Keep all gradients as views of one buffer, which is cleared and clipped as a whole."""
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


@script()
def coalesced_as_for_all_reduce(run):
    def edit(model):
        buckets = {}
        for p in model.parameters():
            buckets.setdefault(p.grad.type(), []).append(p.grad.data)
        for grads in buckets.values():
            coalesced = torch._utils._flatten_dense_tensors(grads)
            coalesced /= 3
            for grad, reduced in zip(grads, torch._utils._unflatten_dense_tensors(coalesced, grads)):
                grad.copy_(reduced)
        return [len(buckets)]

    return stepped(run, edit)


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
        for shared_param, param in zip(shared.parameters(), worker.parameters()):
            hand_over(shared_param, param)
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
    """Share gradients once and zero them in place from then on: both models keep the same gradients."""

    def hand_over(theirs, mine):
        if theirs.grad is None:
            theirs._grad = mine.grad

    return handed_over(run, hand_over, set_to_none=False)


@script()
def gradients_given_to_a_deep_copy(run):
    """Look ahead: a copy of the model steps with its gradients, the model with those of the copy."""
    model, optimizer, x, y = regression()
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(6):
        losses.append(run.error(model, x, y))
        run.gradients(losses[-1], model, optimizer)
        ahead = copy.deepcopy(model)
        for copied, param in zip(ahead.parameters(), model.parameters()):
            copied.grad = copy.deepcopy(param.grad)
        torch.optim.SGD(ahead.parameters(), lr=0.2).step()
        ahead.zero_grad()
        losses.append(run.error(ahead, x, y))
        losses[-1].backward()
        for copied, param in zip(ahead.parameters(), model.parameters()):
            param.grad.add_(copied.grad).div_(2)
        optimizer.step()
    return {"losses": losses, "weights": way()}


@script()
def layers_frozen_by_turns(run):
    model, optimizer, x, y = regression(momentum=0.9, lr=0.05)
    way, losses, seen = way_of(model), [], []
    run.begin(model, optimizer)
    for index in range(9):
        for p in model[0].parameters():
            p.requires_grad_(index % 3 != 2)
        losses.append(run.error(model, x, y))
        if index % 3 == 2:  # gradients are left there from before
            seen += [p.grad.abs() for p in model[0].parameters()]
        for p in model[2].parameters():
            p.grad = None
        run.backward(losses[-1], optimizer)
        if index % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, "weights": way(), "seen": seen}


@script()
def head_replaced_on_the_way(run):
    model, optimizer, x, y = regression(lr=0.05)
    losses = []
    run.begin(model, optimizer)
    for index in range(8):
        if index == 4:
            model[2] = mlp(96, 64, 2, seed=1)
            optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.1})
            way = way_of(model)
        losses.append(run.error(model, x, y))
        optimizer.zero_grad()
        run.backward(losses[-1], optimizer)
        for p in model.parameters():
            p.grad.clamp_(-0.02, 0.02)
        optimizer.step()
    return {"losses": losses, "weights": way()}


@script()
def gradients_one_step_late(run):
    model, optimizer, x, y = regression(lr=0.05)
    way, losses, late = way_of(model), [], None
    run.begin(model, optimizer)
    for _ in range(8):
        losses.append(run.error(model, x, y))
        fresh = run.gradients(losses[-1], model, optimizer)
        if late is not None:
            for p, grad in zip(model.parameters(), late):
                p.grad = grad
            optimizer.step()
        late = fresh
    return {"losses": losses, "weights": way()}


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
def galore_as_a_class_beside_the_session(run):
    """Step with an optimizer that is not passed to initialize."""
    model, optimizer, x, y = regression(rows=96, make=Projected)
    way, losses = way_of(model), []
    run.begin(model)
    for _ in range(8):
        losses.append(run.error(model, x, y))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    return {"losses": losses, "weights": way()}


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


@script(("O4", "O5"))
def clipping_inside_of_the_block(run):
    model, optimizer, x, y = regression(momentum=0.9, lr=0.1)
    way, losses, norms = way_of(model), [], []
    run.begin(model, optimizer)
    for _ in range(8):
        losses.append(run.error(model, x, y))
        optimizer.zero_grad()
        with run.block(losses[-1], optimizer) as scaled:
            scaled.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3))
        optimizer.step()
    return {"losses": losses, "weights": way(), "norms": norms}


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
def gradients_read_by_numpy_in_another_thread(run):
    def edit(model):
        with ThreadPoolExecutor(1) as pool:
            return list(pool.map(lambda p: (p.grad.numpy() ** 2).sum(), model.parameters()))

    return stepped(run, edit)


@script()
def gradients_read_by_four_threads_at_once(run):
    def edit(model):
        start = threading.Barrier(4)

        def look(_):
            start.wait()
            return sum((p.grad**2).sum() for p in model.parameters())

        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(look, range(4)))

    return stepped(run, edit)


@script()
def views_of_gradients_by_numpy(run):
    def edit(model):
        for p in model.parameters():
            view = p.grad.numpy()
            view *= 0.5

    return stepped(run, edit)


@script()
def views_of_gradients_by_dlpack(run):
    def edit(model):
        for p in model.parameters():
            torch.from_dlpack(p.grad).mul_(0.5)

    return stepped(run, edit)


def logged(run, mode=contextlib.nullcontext, every=1):
    model, optimizer, x, y = regression(momentum=0.9, lr=0.05)
    way, losses, log = way_of(model), [], []
    run.begin(model, optimizer)
    for index in range(9):
        for part in zip(x.split(16), y.split(16)):
            losses.append(run.error(model, *part))
            run.backward(losses[-1], optimizer)
            if index % every == 0:
                with mode():
                    log.append(sum(p.grad.pow(2).sum().item() for p in model.parameters()) ** 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=index % 2 == 0)
    return {"losses": losses, "weights": way(), "log": log}


@script()
def log_of_squares(run):
    return logged(run)


@script()
def log_of_squares_now_and_then(run):
    return logged(run, every=3)


@script()
def log_of_squares_in_inference_mode(run):
    return logged(run, torch.inference_mode, every=3)


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


@script()
def pcgrad(run):
    model, optimizer, x, y = regression()
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(8):
        with run.casts():
            output = model(x)
        of_tasks = [F.mse_loss(output[:, index].float(), y[:, index]) for index in range(2)]
        gradients = []
        for index, loss in enumerate(of_tasks):
            optimizer.zero_grad()
            with run.block(loss, optimizer) as scaled:
                scaled.backward(retain_graph=index == 0)
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        losses += of_tasks
        projected = [g.clone() for g in gradients]
        for one, other in ((0, 1), (1, 0)):
            inner = torch.dot(projected[one], gradients[other])
            if inner < 0:
                projected[one] -= inner * gradients[other] / gradients[other].norm() ** 2
        merged = torch.stack(projected).mean(0)
        for p, part in zip(model.parameters(), merged.split([p.numel() for p in model.parameters()])):
            p.grad = part.view_as(p)
        optimizer.step()
    return {"losses": losses, "weights": way()}


@script()
def galore(run):
    basis, mean = {}, {}

    def edit(model):
        p = model[0].weight
        if not basis:
            basis[p] = torch.linalg.svd(p.grad, full_matrices=False)[0][:, :2]
        low = basis[p].T @ p.grad
        mean[p] = mean[p].lerp(low, 0.5) if mean else low
        p.grad = basis[p] @ mean[p]

    return stepped(run, edit, rows=96)


def orthogonal(g, steps=3):
    x = g / (g.norm() + 1e-7)
    for _ in range(steps):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    return x


@script()
def muon(run):
    model, x = mlp(64, 96, 64), noise_of(26)(128, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    y, way, losses, momentum = x.roll(1, 1).sin(), way_of(model), [], {}
    run.begin(model, optimizer)
    for _ in range(6):
        losses.append(run.error(model, x, y))
        run.gradients(losses[-1], model, optimizer)
        for p in model.parameters():
            if p.ndim == 2:
                momentum[p] = momentum.get(p, torch.zeros_like(p.grad)).mul_(0.9).add_(p.grad)
                p.grad.copy_(orthogonal(p.grad.add(momentum[p], alpha=0.9)))
        optimizer.step()
    return {"losses": losses, "weights": way()}
