"""torch.nn.DataParallel: one process, several GPUs. `initialize` comes first, then the wrapper."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import ampkit

if torch.cuda.device_count() < 2:
    print(f"data_parallel: needs two GPUs, found {torch.cuda.device_count()}; nothing was run")
    sys.exit(0)

x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)).cuda()
y = x[:, :1].sin()


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).cuda()
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def changes(model):
    before = build()[0].state_dict()
    return torch.cat([(before[name] - value).flatten() for name, value in model.state_dict().items()])


plain, optimizer = build()
F.mse_loss(plain(x), y).backward()
optimizer.step()

model, optimizer = build()
model, optimizer = ampkit.initialize(model, optimizer, opt_level="O2", verbosity=0)
parallel = nn.DataParallel(model)
with ampkit.scale_loss(F.mse_loss(parallel(x), y), optimizer) as scaled_loss:
    scaled_loss.backward()
optimizer.step()

changed, expected = changes(model), changes(plain)
distance = float((changed - expected).norm() / expected.norm())
assert distance < 0.02
ampkit.close()
print(f"data_parallel: {torch.cuda.device_count()} GPUs, step {distance:.2%} from float32 on one")
