"""``grad_dtype`` of torch since 2.9, with sessions: as far from float32 as torch.autocast."""

import contextlib

import pytest
import torch
from helpers import iterate, iterate_in_torch
from torch import nn
from torch.nn import functional as F

import ampkit

X = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))


def change(how, width=16, born_in=torch.float32):
    """The change of weights whose gradients are float32 in 20 steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 3)).to(born_in)
    before = [param.detach().clone().double().flatten() for param in model.parameters()]
    for param in model.parameters():
        param.grad_dtype = torch.float32
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if how.startswith("O"):
        ampkit.initialize(model, optimizer, opt_level=how, verbosity=0)

    def loss():
        with torch.autocast("cpu", torch.bfloat16) if how == "autocast" else contextlib.nullcontext():
            return F.mse_loss(model(X).float(), X[:, :3].sin())

    (iterate if how.startswith("O") else iterate_in_torch)(loss, optimizer, 20)
    if how != "O2":  # where the gradient of a stored weight is in its dtype
        assert {param.grad.dtype for param in model.parameters()} == {torch.float32}
    values = [value.detach().double().flatten() for value in model.state_dict().values()]
    ampkit.close()
    assert {param.dtype for param in model.parameters()} == {born_in}
    return torch.cat(values) - torch.cat(before)


@pytest.mark.parametrize("level, width", (("O1", 16), ("O2", 16), ("O5", 600)))
def test_float32_gradients_train_as_well_as_under_autocast(width, level):
    exact = change("float32", width)
    error, cast = ((change(how, width) - exact).norm() / exact.norm() for how in (level, "autocast"))
    assert error <= 2 * cast + 0.005


@pytest.mark.parametrize("level", ("O1", "O2", "O4", "O5"))
@pytest.mark.parametrize("born_in", (torch.bfloat16, torch.float16), ids=str)
def test_float32_gradients_of_weights_that_came_in_lower_precision(born_in, level):
    """torch allows no gradient of another dtype than ``grad_dtype``, also when the session restores the dtype."""
    exact = change("float32")
    error = (change(level, born_in=born_in) - exact).norm() / exact.norm()
    assert error <= 0.02
