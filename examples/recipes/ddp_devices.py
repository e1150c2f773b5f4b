"""DistributedDataParallel over a model that lies on two devices, in each process: layers on one GPU, layers on the next.

$ torchrun --nproc_per_node=1 ddp_devices.py

`device_ids` stays None then, as without ampkit; weights are cast and gradients judged where they lie.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ampkit

world_size = int(os.environ.get("WORLD_SIZE", 1))
if torch.cuda.device_count() < 2 * world_size:
    print(f"ddp_devices: needs {2 * world_size} GPUs, found {torch.cuda.device_count()}; nothing was run")
    sys.exit(0)
for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
    os.environ.setdefault(name, value)
dist.init_process_group("nccl")
rank, first = dist.get_rank(), 2 * int(os.environ.get("LOCAL_RANK", 0))
x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
y = x[:, :1].sin()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.below, self.above = nn.Linear(16, 32).to(first), nn.Linear(32, 1).to(first + 1)

    def forward(self, x):
        return self.above(torch.tanh(self.below(x.to(first))).to(first + 1))


def changes(model):
    before = Net().state_dict()
    return torch.cat([(before[name] - value).flatten().cpu() for name, value in model.state_dict().items()])


plain = Net()
F.mse_loss(plain(x), y.to(first + 1)).backward()
torch.optim.SGD(plain.parameters(), lr=1.0).step()

model = Net()
model, optimizer = ampkit.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), opt_level="O2", verbosity=0)
inputs, target = x[rank::world_size], y[rank::world_size].to(first + 1)
with ampkit.scale_loss(F.mse_loss(DistributedDataParallel(model)(inputs), target), optimizer) as scaled_loss:
    scaled_loss.backward()
optimizer.step()
distance = float((changes(model) - changes(plain)).norm() / changes(plain).norm())
assert distance < 0.02
print(f"ddp_devices: two GPUs in each of {world_size} process(es), step {distance:.2%} from float32")
dist.destroy_process_group()
