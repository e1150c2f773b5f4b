"""Add up the gradients of several micro-batches before a step.

Blocks add up by themselves, in float32. `delay_unscale=True` on all but the last adds in the gradients' own precision: cheaper.
"""

import torch
from torch import nn
from torch.nn import functional as F

import ampkit

MICRO_BATCHES = 8
device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)).to(device)
y = x[:, :1].sin()


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def changes(model):
    """The changes by a step of SGD with a rate of 1: the sum of the gradients."""
    before = build()[0].state_dict()
    return torch.cat([(before[name] - value).flatten() for name, value in model.state_dict().items()])


def accumulated(delay: bool):
    model, optimizer = build()
    model, optimizer = ampkit.initialize(model, optimizer, opt_level="O2", verbosity=0)
    for index, (part_x, part_y) in enumerate(zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES))):
        loss = F.mse_loss(model(part_x), part_y) / MICRO_BATCHES
        with ampkit.scale_loss(loss, optimizer, delay_unscale=delay and index < MICRO_BATCHES - 1) as scaled_loss:
            scaled_loss.backward()
    optimizer.step()
    changed = changes(model)
    ampkit.close()
    return changed


plain, optimizer = build()
F.mse_loss(plain(x), y).backward()  # one large batch
optimizer.step()
expected = changes(plain)

distances = [float((accumulated(delay) - expected).norm() / expected.norm()) for delay in (False, True)]
assert distances[0] < 0.02 and distances[1] < 0.03
print(
    f"accumulation: {MICRO_BATCHES} micro-batches are {distances[0]:.2%} from one batch in float32, delayed {distances[1]:.2%}"
)
