"""scope="forward": O1's casts end at the models that were initialized."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from helpers import initialize_quietly, iterate
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampkit
from ampkit.errors import ConfigurationError

LOW = torch.bfloat16


def product():
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


class Watched(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 2)
        self.seen = []

    def forward(self, x):
        x = self.inner(x)
        self.seen.append(x.dtype)
        return self.head(x)


def initialized(model, optimizer=None, **settings):
    return ampkit.initialize(model, optimizer, opt_level="O1", scope="forward", verbosity=0, **settings)


def test_calls_outside_of_the_model_stay_float32():
    baseline = nn.Linear(4, 2)
    x = torch.randn(3, 4)
    expected = baseline(x)
    model = initialized(Watched())
    out = model(x)
    assert model.seen == [LOW] and out.dtype is torch.float32
    with ThreadPoolExecutor(1) as pool:
        pool.submit(model, x).result()
    assert model.seen == [LOW, LOW]
    assert product() is torch.float32 and not torch.is_autocast_enabled("cpu")
    assert torch.equal(baseline(x), expected)


def test_parts_hand_lower_precision_on():
    """A submodule in a region inside of the forward, and a model inside of another."""

    class Net(Watched):
        def forward(self, x):
            hidden = self.inner(x)
            with torch.autocast("cpu", enabled=False):
                self.seen.append(self.inner[1](hidden).dtype)
            return hidden

    outer = nn.Sequential(nn.Linear(4, 4), Net())
    outer, inner = initialized([outer, outer[1]])
    inner.register_forward_hook(lambda module, args, out: inner.seen.append(out.dtype))
    assert outer(torch.randn(2, 4)).dtype is torch.float32
    assert inner.seen == [LOW, LOW]


def test_submodule_can_be_scripted():
    model = initialized(Watched())
    scripted = torch.jit.script(model.inner)
    x = torch.randn(2, 4)
    ampkit.close()
    assert torch.equal(scripted(x), model.inner(x))


def test_region_around_the_call_has_the_last_word():
    model = initialized(Watched())
    with torch.autocast("cpu", enabled=False):
        model(torch.randn(2, 4))
        model.head(torch.randn(2, 8))
    assert model.seen == [torch.float32]


def test_trains_as_at_process_scope():
    x, y = torch.randn(16, 4), torch.randint(0, 2, (16,))
    losses = []
    for scope in ("process", "forward"):
        torch.manual_seed(0)
        model, optimizer = initialize_quietly(Watched(), lambda p: torch.optim.SGD(p, lr=0.1), "O1", scope=scope)
        losses.append(iterate(lambda: F.cross_entropy(model(x), y), optimizer, times=5))  # noqa: B023
        ampkit.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_model_is_cast_and_what_surrounds_it_is_not(backend):
    model = initialized(Watched())

    @torch.compile(backend=backend, fullgraph=True)
    def step(x, w):
        return model(x), x @ w

    out, beside = step(torch.randn(3, 4), torch.randn(4, 4))
    assert out.dtype is torch.float32 and beside.dtype is torch.float32
    compiled = torch.compile(lambda x: model(x), backend=backend, fullgraph=True)
    x = torch.randn(3, 4)
    cast = compiled(x)
    with torch.autocast("cpu", enabled=False):
        uncast = compiled(x)
    torch.testing.assert_close(cast, model(x))
    ampkit.close()
    assert torch.equal(uncast, model(x)) and not torch.equal(cast, uncast)


def test_two_scopes_at_once_are_refused():
    model = initialized(Watched())
    with pytest.raises(ConfigurationError, match="scope='process'"):
        ampkit.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    assert model(torch.randn(2, 4)).dtype is torch.float32


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["", "inner"], ids=["model", "submodule"])
@pytest.mark.parametrize("region", [False, True], ids=["cast", "in a float32 region"])
def test_checkpoint_outside_of_the_model_runs_it_again_as_it_ran(name, reentrant, region):
    """The gradients are those of the forward, bit for bit: those of a float32 one are up to 1e-2 off."""
    part = initialized(Watched()).get_submodule(name)
    x = torch.randn(8, 4, requires_grad=True)
    gradients = []
    for forward in (part, lambda x: checkpoint(part, x, use_reentrant=reentrant)):
        part.zero_grad()
        with torch.autocast("cpu", enabled=False) if region else contextlib.nullcontext():
            loss = forward(x).square().sum()
        loss.backward()
        gradients.append([p.grad for p in part.parameters()])
    assert all(map(torch.equal, *gradients))
