"""Writes by the hooks on an optimizer's step, before the update and after it, count as they do in float32.

Weights, inputs and rates are powers of two, so that every number of the two steps is exact in bfloat16: a write that was lost
shows as another number.
"""

import pytest
import torch
from helpers import assert_same, backward, initialize_quietly, iterate, iterate_in_torch, values_of
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import ampkit
from ampkit.optimizers import FusedSGD


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


# When the hook runs, the parameters that it has, and what it does to each.
HOOKS = {
    "halves gradients of the model": ("before", "model", lambda p: p.grad.mul_(0.5)),
    "halves gradients, of all optimizers": ("before, of all optimizers", "model", lambda p: p.grad.mul_(0.5)),
    "assigns gradients of the model": ("before", "model", lambda p: setattr(p, "grad", p.grad * 0.5)),
    "halves gradients of the groups": ("before", "groups", lambda p: p.grad.mul_(0.5)),
    "halves the model": ("before", "model", lambda p: p.data.mul_(0.5)),
    "clamps the groups": ("before", "groups", lambda p: p.clamp_(-0.25, 0.25)),
    "clamps the groups afterwards": ("after", "groups", lambda p: p.clamp_(-0.25, 0.25)),
    "clamps the model afterwards": ("after", "model", lambda p: p.clamp_(-0.25, 0.25)),
}


class Derived(torch.optim.SGD):
    """An optimizer whose step ampkit does not know; it runs over stand-ins."""


OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.25),
    "SGD over stand-ins": lambda params: Derived(params, lr=0.25),
    "fused SGD of torch": lambda params: torch.optim.SGD(params, lr=0.25, fused=True),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.25),
}


def place_on_all(optimizer, write):
    return register_optimizer_step_pre_hook(lambda one, *_: write() if one is optimizer else None)


PLACES = {
    "before": lambda optimizer, write: optimizer.register_step_pre_hook(lambda *_: write()),
    "after": lambda optimizer, write: optimizer.register_step_post_hook(lambda *_: write()),
    "before, of all optimizers": place_on_all,
}


def train(make_optimizer, hook, level=None):
    model = nn.Sequential(nn.Linear(2, 8, bias=False), nn.Linear(8, 2, bias=False))
    for p in model.parameters():
        nn.init.ones_(p)
    optimizer = make_optimizer(model.parameters())
    if level is not None:
        model, optimizer = ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
    when, whose, write = hook

    @torch.no_grad()
    def write_all():
        for p in model.parameters() if whose == "model" else params_of(optimizer):
            write(p)

    handle, x = PLACES[when](optimizer, write_all), torch.ones(1, 2)
    (iterate_in_torch if level is None else iterate)(lambda: model(x).sum(), optimizer, 2)
    handle.remove()
    return [*values_of(model).values(), model(x).float()]


@pytest.mark.parametrize(
    "optimizer_name, level", [*((name, "O2") for name in OPTIMIZERS), ("SGD", "O1"), ("FusedSGD", "O1")]
)
@pytest.mark.parametrize("name", HOOKS)
def test_what_a_step_hook_writes_counts(name, optimizer_name, level):
    hook, make_optimizer = HOOKS[name], OPTIMIZERS[optimizer_name]
    expected = train(make_optimizer, hook)
    assert not torch.equal(expected[0], train(make_optimizer, (*hook[:2], lambda p: None))[0])  # the hook matters
    assert_same(train(make_optimizer, hook, level), expected)


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_gradients_that_a_hook_looks_at_were_clipped_once(make_optimizer):
    """The four gradients are 1, their norm is 2, and clipping it to 1 halves them."""
    seen, model = [], nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = initialize_quietly(model, make_optimizer, "O2", policy="apex")
    optimizer.register_step_pre_hook(lambda one, *_: seen.append(params_of(one)[0].grad.float()))
    backward(model(torch.ones(1, 4)).sum(), optimizer)
    ampkit.clip_grad_norm_(optimizer, 1.0)
    optimizer.step()
    assert torch.allclose(seen[0], torch.full((1, 4), 0.5), rtol=1e-5)
    assert torch.allclose(model.state_dict()["weight"], torch.full((1, 4), -0.125), rtol=1e-5)
