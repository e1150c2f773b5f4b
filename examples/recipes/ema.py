"""A moving average of the weights, for evaluation. It averages the float32 values: bfloat16 would lose its small steps.

A deep copy of an initialized model is a plain float32 model, and `model.state_dict()` is float32 at every level.
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F

import ampkit

STEPS, DECAY = 50, 0.99
device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)).to(device)
y = x[:, :1].sin()


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)


def train(model, optimizer, backward):
    average = copy.deepcopy(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        backward(F.mse_loss(model(x), y), optimizer)
        optimizer.step()
        for name, value in average.state_dict().items():
            value.lerp_(model.state_dict()[name], 1 - DECAY)
    return torch.cat([value.flatten() for value in average.state_dict().values()])


def scaled_backward(loss, optimizer):
    with ampkit.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()


plain = build()
expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), lambda loss, _: loss.backward())
start = torch.cat([value.flatten() for value in build().state_dict().values()])

model = build()
model, optimizer = ampkit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
weights = train(model, optimizer, scaled_backward)
distance = float((weights - expected).norm() / (expected - start).norm())
assert weights.dtype is torch.float32 and distance < 0.02
ampkit.close()
print(f"ema: after {STEPS} steps the average has moved as in float32, within {distance:.2%}")
