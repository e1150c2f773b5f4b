"""Factories that test_tune.py trains in other processes. Figures of the first are known on paper."""

import os

import torch
from torch import nn

import ampkit

RATE = 2.0**-12
GRADIENT = 8.0
WIDTH = 64


class Sum(nn.Module):
    """A model that sums all products of ones and of weights that are 0.75; the gradient of each weight is `GRADIENT`."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.constant_(self.layer.weight, 0.75)

    def forward(self, x):
        return self.layer(x)


def on_paper():
    """Return a training without momentum, so that there is nothing to store in 8 bits."""
    model = Sum()
    batches = [(torch.ones(1, WIDTH), GRADIENT)]
    return model, torch.optim.SGD(model.parameters(), RATE), batches, lambda found, factor: found.float().sum() * factor


def net():
    """Return a training whose gradients depend on every rounding; several inputs, a dict of them in every second batch."""
    torch.manual_seed(1)
    model = Two()
    inputs = [torch.randn(16, 8) for _ in range(4)]
    batches = [(inputs[:2], torch.randn(16, 2)), ({"a": inputs[2], "b": inputs[3]}, torch.randn(16, 2))]
    return model, torch.optim.RMSprop(model.parameters(), 1e-3), batches, nn.functional.mse_loss


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other, self.head = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(32, 2)

    def forward(self, a, b):
        return self.head(torch.tanh(self.one(a)) * torch.tanh(self.other(b)))


class Failing(Two):
    def forward(self, a, b):
        session = ampkit.current_session()
        if session is not None and session.plan.opt_level == "O1":
            raise RuntimeError("not at O1\nand more words")
        if session is not None and session.plan.opt_level == "O2":
            os._exit(7)
        return super().forward(a, b)


def failing():
    print("a line that is nobody's answer")
    _, _, batches, loss_fn = net()
    model = Failing()
    return model, torch.optim.RMSprop(model.parameters(), 1e-3), batches, loss_fn


def broken():
    raise OSError("no such data")
