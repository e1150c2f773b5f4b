"""What an iteration runs besides the script's own operators: on small models that is what training takes longer by."""

import pytest
import torch
from helpers import STORED_BF16, Operators, at
from torch import nn

import ampkit

X = torch.ones(2, 4)


def backward(loss, optimizer, loss_id=0):
    with ampkit.scale_loss(loss, optimizer, loss_id) as scaled:
        scaled.backward()


@pytest.mark.parametrize("level", ["O2", STORED_BF16])
def test_rounding_masters_into_weights_makes_no_views_of_them(level):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model, optimizer = ampkit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.5), **at(level, verbosity=0))
    for _ in range(2):  # what a first step makes is made once
        optimizer.step()
        optimizer.zero_grad()
        backward(model(X).float().sum(), optimizer)
    before = model[1].bias.detach().clone()
    with Operators() as operators:
        optimizer.step()
    assert "detach" not in operators.names
    # The gradient of each is 2, of as many rows.
    torch.testing.assert_close(model[1].bias, before - 1.0)
