"""torch.compile of an initialized model, in one graph. In the order of a script: initialize, then compile."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import ampkit

# "aot_eager" needs no compiler, and so runs anywhere; "inductor", torch's default, is what makes it fast.
backend = sys.argv[1] if len(sys.argv) > 1 else "aot_eager"
device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)).to(device)
y = x[:, :1].sin()


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 1)).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def changes(model):
    before = build()[0].state_dict()
    return torch.cat([(before[name] - value).flatten() for name, value in model.state_dict().items()])


plain, optimizer = build()
F.mse_loss(plain(x), y).backward()
optimizer.step()
expected = changes(plain)

distances = {}
for level in ("O1", "O2"):
    model, optimizer = build()
    model, optimizer = ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with ampkit.scale_loss(F.mse_loss(compiled(x), y), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    distances[level] = float((changes(model) - expected).norm() / expected.norm())
    ampkit.close()
assert max(distances.values()) < 0.02
print(
    f"compiled: in one graph by {backend}; steps {distances['O1']:.2%} (O1) and {distances['O2']:.2%} (O2) from float32"
)
