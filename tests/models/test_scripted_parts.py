"""TorchScript modules: their calls are cast by torch.autocast, at every level, and their weights stay float32."""

import contextlib
import warnings
from collections import OrderedDict

import pytest
import torch
from helpers import initialize_quietly, iterate, sgd
from torch import nn

import ampkit


class Scaled(nn.Module):
    def forward(self, x):
        return 2 * x


def model_with(part):
    return nn.Sequential(OrderedDict(body=nn.Linear(4, 4), neck=nn.Sequential(nn.ReLU(), part)))


PARTS = {
    "scripted": lambda: torch.jit.script(nn.Linear(4, 2)),
    "traced": lambda: torch.jit.trace(nn.Linear(4, 2), torch.ones(1, 4)),
    "frozen weights": lambda: torch.jit.script(nn.Linear(4, 2).requires_grad_(False)),
    "no weights": lambda: torch.jit.script(Scaled()),
    "buffers only": lambda: torch.jit.script(nn.BatchNorm1d(4, affine=False)),
}


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_model_with_a_scripted_part_trains_as_under_autocast(part, level):
    """The script's weights stay float32, and its calls are cast by torch.autocast."""

    def losses(way):
        torch.manual_seed(0)
        model = model_with(part())
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        ampkit.initialize(model, optimizer, opt_level=level if way == "ours" else "O0", verbosity=0)

        def loss():
            x = torch.randn(16, 4)
            with torch.autocast("cpu") if way == "autocast" else contextlib.nullcontext():
                return (model(x).float() - x.sum(1, keepdim=True)).square().mean()

        values = [iterate(loss, optimizer) for _ in range(10)]
        assert {tensor.dtype for tensor in model.neck[1].state_dict().values()} <= {torch.float32, torch.int64}
        ampkit.close()
        return torch.tensor(values)

    exact = losses("float32")
    distance = (losses("autocast") - exact).abs().mean()
    assert (losses("ours") - exact).abs().mean() < max(0.02 * exact.mean(), 2 * distance)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_scripted_part_that_came_in_bfloat16_is_float32_until_close(part, level):
    model = model_with(part()).bfloat16()
    before = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    values = {name: tensor.float() for name, tensor in model.state_dict().items()}
    ampkit.initialize(model, opt_level=level, verbosity=0)
    frozen = {name for name, param in model.named_parameters() if level in ("O1", "O5") and not param.requires_grad}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.float(), values[name]), name
        assert tensor.dtype in ((torch.bfloat16,) if name in frozen else (torch.float32, torch.int64)), name
    with torch.no_grad():
        model.eval()(torch.ones(3, 4))
    ampkit.close()
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == before
    assert model(torch.ones(3, 4).bfloat16()).dtype is torch.bfloat16


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_scripted_model_trains_at_o1(level):
    model = torch.jit.script(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
    returned, optimizer = initialize_quietly(model, sgd, level)
    x = torch.randn(64, 4)
    assert returned is model and model(x).dtype is torch.bfloat16
    first, last = (
        iterate(lambda: (model(x).float() - x.sum(1, keepdim=True)).square().mean(), optimizer, times)
        for times in (1, 39)
    )
    ampkit.close()
    assert last < 0.1 * first and model(x).dtype is torch.float32


@pytest.mark.parametrize("level, settings", [("O2", {}), ("O1", dict(scope="forward"))])
def test_scripted_model_is_refused_where_its_forward_would_be_wrapped(level, settings):
    model = torch.jit.script(nn.Linear(4, 2))
    with pytest.raises(ampkit.ConfigurationError, match=r"TorchScript.*before scripting.*'O1'"):
        ampkit.initialize(model, opt_level=level, verbosity=0, **settings)
    assert model.weight.dtype is torch.float32 and ampkit.current_session() is None


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
def test_a_trace_of_a_model_warns_of_nothing_and_holds_what_was_written_before(level):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model, optimizer = initialize_quietly(model, sgd, level)
    with torch.no_grad():
        next(ampkit.master_params(optimizer)).fill_(0.5)  # a loan, which ends before the trace records anything
    x = torch.arange(8.0).view(2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(model, x)
    assert "split" not in str(traced.graph) and torch.equal(traced(x), model(x))
