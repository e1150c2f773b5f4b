"""LARC around any optimizer: the published update, and the arguments that it passes to the optimizer inside."""

import copy
import functools

import pytest
import torch
from helpers import iterate, saved_and_loaded
from torch import nn

import ampkit
from ampkit.apex.parallel.LARC import LARC
from ampkit.optimizers import FusedAdam


def larc(params, grads, lr, decay, tc, clip, eps):
    """Return the update of You et al. 2017, section 4, with the local rate clipped at the global one."""
    moved = []
    for w, g in zip(params, grads):
        w, g = w.detach().double(), g.double()
        rate = tc * w.norm() / (g.norm() + decay * w.norm() + eps)
        rate = min(rate / lr, 1.0) if clip else rate
        moved.append(w - lr * rate * (g + decay * w))
    return moved


@pytest.mark.parametrize("level", [None, "O0", "O1", "O2", "O3", "O5"])
@pytest.mark.parametrize("clip", [False, True])
def test_larc_is_the_published_update_at_every_level(level, clip):
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 2, bias=False))
    with torch.no_grad():
        model[2].weight.mul_(100)  # one tensor on either side of the clip
    optimizer = LARC(torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01), trust_coefficient=0.02, clip=clip)
    x = torch.randn(5, 4)
    twin = copy.deepcopy(model)
    twin(x).sum().backward()
    wanted = larc(model.parameters(), [p.grad for p in twin.parameters()], 0.1, 0.01, 0.02, clip, 1e-8)
    if level is not None:
        model, optimizer = ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
        iterate(lambda: model(x).sum(), optimizer)
    else:
        model(x).sum().backward()
        optimizer.step()
    assert optimizer.param_groups[0]["weight_decay"] == 0.01
    tolerance = 1e-5 if level in (None, "O0") else 2e-2
    for found, value in zip(model.state_dict().values(), wanted, strict=True):
        assert (found.double() - value).abs().max() <= tolerance * value.abs().max()


def test_larc_leaves_tensors_without_a_norm_to_the_optimizer():
    zero, still = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))
    optimizer = LARC(torch.optim.SGD([zero, still], lr=0.5))
    zero.grad, still.grad = torch.ones(2), torch.zeros(2)
    optimizer.step()
    assert torch.equal(zero.detach(), torch.full((2,), -0.5)) and torch.equal(still.detach(), torch.ones(2))


def test_larc_passes_on_what_an_optimizer_has():
    p = nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([p], lr=0.5, momentum=0.9)
    optimizer = LARC(inner)
    assert optimizer.param_groups is inner.param_groups and optimizer.state is inner.state
    p.grad = torch.ones(2)
    optimizer.step()
    other = LARC(torch.optim.SGD([p], lr=0.1, momentum=0.9))
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 0.5
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(inner.param_groups) == 2
    optimizer.zero_grad()
    assert p.grad is None
    assert repr(optimizer) == repr(inner)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("copied", [copy.deepcopy, functools.partial(saved_and_loaded, weights_only=False)])
def test_larc_is_copied_without_what_initialize_put_on_it(level, copied):
    model = nn.Linear(2, 1, bias=False)
    optimizer = LARC(torch.optim.SGD(model.parameters(), lr=0.5), trust_coefficient=0.25, clip=False, eps=0.0)
    model, optimizer = ampkit.initialize(model, optimizer, opt_level=level, policy="apex", verbosity=0)
    twin = copied(optimizer)
    (param,) = twin.param_groups[0]["params"]
    before = [model.weight.detach().clone(), param.detach().clone()]
    param.grad = torch.tensor([[3.0, 4.0]])
    twin.step()
    # The local rate is 0.25 * |w| / |g|, with |g| = 5.
    expected = before[1] - 0.5 * 0.25 * before[1].norm() / 5.0 * param.grad.new_tensor([[3.0, 4.0]])
    assert torch.allclose(param, expected) and torch.equal(model.weight, before[0])
    assert (twin.trust_coefficient, twin.clip, twin.eps) == (0.25, False, 0.0)


def test_larc_leaves_moments_of_its_optimizer_in_the_dtype_that_was_asked_for():
    model = torch.nn.Linear(2, 1).bfloat16()
    optimizer = LARC(FusedAdam(model.parameters(), state_dtype="bfloat16"))
    model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    ampkit.initialize(model, optimizer, opt_level="O1", verbosity=0)
    for end in (lambda: None, ampkit.close):
        end()
        assert [state["exp_avg"].dtype for state in optimizer.state.values()] == [torch.bfloat16] * 2


def test_larc_around_parameters_says_what_it_goes_around():
    with pytest.raises(TypeError, match=r"LARC goes around an optimizer, found a generator.*LARC\(torch.optim.SGD"):
        LARC(nn.Linear(2, 2).parameters())
