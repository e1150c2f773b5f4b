"""Clip gradients by their norm.

After the block they are unscaled, so the bound is in the units of float32. `ampkit.clip_grad_norm_` works on what the optimizer
will use, without waiting for the device; torch's own function on `model.parameters()` does too.
"""

import torch
from torch import nn
from torch.nn import functional as F

import ampkit

MAX_NORM = 0.5
device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)).to(device)
y = 10 * x[:, :1]


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def changes(model):
    """The changes by a step of SGD with a rate of 1: the clipped gradients."""
    before = build()[0].state_dict()
    return torch.cat([(before[name] - value).flatten() for name, value in model.state_dict().items()])


plain, optimizer = build()
F.mse_loss(plain(x), y).backward()
plain_norm = nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
optimizer.step()

model, optimizer = build()
low = ampkit.DynamicLossScale(init_scale=2.0**10)  # one step leaves no time for 2**16 to come down in float16
model, optimizer = ampkit.initialize(model, optimizer, opt_level="O2", loss_scale=low, verbosity=0)
with ampkit.scale_loss(F.mse_loss(model(x), y), optimizer) as scaled_loss:
    scaled_loss.backward()
norm = ampkit.clip_grad_norm_(optimizer, MAX_NORM)  # the norm before
optimizer.step()

changed, expected = changes(model), changes(plain)
distance = float((changed - expected).norm() / expected.norm())
assert abs(norm / plain_norm - 1) < 0.01 and abs(changed.norm() / MAX_NORM - 1) < 0.01 and distance < 0.02
ampkit.close()
print(
    f"clipping: norm {norm:.2f} (float32 {plain_norm:.2f}), clipped to {changed.norm():.3f}, {distance:.2%} from float32"
)
