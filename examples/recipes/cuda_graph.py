"""An iteration in a CUDA graph. With a fused optimizer nothing waits for the device, the loss scale included."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import ampkit
from ampkit.optimizers import FusedSGD

if not torch.cuda.is_available():
    print("cuda_graph: needs a GPU; nothing was run")
    sys.exit(0)

STEPS, WARM_UP = 8, 3
x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)).cuda()
y = x[:, :1].sin()


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).cuda()


plain = build()
optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
for _ in range(STEPS):
    optimizer.zero_grad()
    F.mse_loss(plain(x), y).backward()
    optimizer.step()

model = build()
model, optimizer = ampkit.initialize(model, FusedSGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)


def iteration():
    optimizer.zero_grad()
    with ampkit.scale_loss(F.mse_loss(model(x), y), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


stream = torch.cuda.Stream()
stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(stream):
    for _ in range(WARM_UP):
        iteration()
torch.cuda.current_stream().wait_stream(stream)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    iteration()  # recorded, not run
for _ in range(STEPS - WARM_UP):
    graph.replay()

expected, weights = (torch.cat([v.flatten() for v in net.state_dict().values()]) for net in (plain, model))
distance = float((weights - expected).norm() / expected.norm())
assert distance < 0.02
print(f"cuda_graph: {STEPS} steps, {STEPS - WARM_UP} of them replayed, {distance:.2%} from float32")
