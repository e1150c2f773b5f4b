"""Features of torch since 2.9, with sessions: Muon, and ``grad_dtype``. They are as far from float32 as torch.autocast."""

import contextlib

import pytest
import torch
from helpers import backward
from torch import nn
from torch.nn import functional as F

import ampkit

X = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))


def muon_and_adamw(model):
    matrices, others = ([p for p in model.parameters() if (p.ndim == 2) is wanted] for wanted in (True, False))
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


def with_float32_gradients(model):
    for param in model.parameters():
        param.grad_dtype = torch.float32
    return [torch.optim.AdamW(model.parameters(), lr=0.01)]


def change(make, how, width=16, born_in=torch.float32):
    """The change of the weights in 20 steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 3)).to(born_in)
    before = [param.detach().clone().double().flatten() for param in model.parameters()]
    optimizers = make(model)
    if how.startswith("O"):
        ampkit.initialize(model, optimizers, opt_level=how, verbosity=0)
    for _ in range(20):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if how == "autocast" else contextlib.nullcontext():
            loss = F.mse_loss(model(X).float(), X[:, :3].sin())
        if how.startswith("O"):
            backward(loss, optimizers)
        else:
            loss.backward()
        if make is with_float32_gradients and how != "O2":  # where the gradient of a stored weight is in its dtype
            assert {param.grad.dtype for param in model.parameters()} == {torch.float32}
        for optimizer in optimizers:
            optimizer.step()
    values = [value.detach().double().flatten() for value in model.state_dict().values()]
    ampkit.close()
    assert {param.dtype for param in model.parameters()} == {born_in}
    return torch.cat(values) - torch.cat(before)


@pytest.mark.parametrize("level, width", (("O1", 16), ("O2", 16), ("O5", 600)))
@pytest.mark.parametrize("make", (muon_and_adamw, with_float32_gradients), ids=lambda make: make.__name__)
def test_they_train_as_well_as_under_autocast(make, width, level):
    exact = change(make, "float32", width)
    error, cast = ((change(make, how, width) - exact).norm() / exact.norm() for how in (level, "autocast"))
    assert error <= 2 * cast + 0.005


@pytest.mark.parametrize("level", ("O1", "O2", "O4", "O5"))
@pytest.mark.parametrize("born_in", (torch.bfloat16, torch.float16), ids=str)
def test_float32_gradients_of_weights_that_came_in_lower_precision(born_in, level):
    """torch allows no gradient of another dtype than ``grad_dtype``, also when the session restores the dtype."""
    exact = change(with_float32_gradients, "float32")
    error = (change(with_float32_gradients, level, born_in=born_in) - exact).norm() / exact.norm()
    assert error <= 0.02
