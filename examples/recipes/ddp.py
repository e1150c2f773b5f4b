"""DistributedDataParallel, a process for each device: `initialize` comes first, then the wrapper.

$ torchrun --nproc_per_node=2 ddp.py

Without torchrun it is one process. On machines with fewer GPUs than processes, all work on the CPU.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ampkit

for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
    os.environ.setdefault(name, value)
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
on_cuda = torch.cuda.device_count() >= world_size
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_cuda else torch.device("cpu")
dist.init_process_group("nccl" if on_cuda else "gloo")
x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)).to(device)
y = x[:, :1].sin()


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def changes(model):
    before = build()[0].state_dict()
    return torch.cat([(before[name] - value).flatten() for name, value in model.state_dict().items()])


plain, optimizer = build()
F.mse_loss(plain(x), y).backward()  # the batches of all ranks, in one process
optimizer.step()

model, optimizer = build()
model, optimizer = ampkit.initialize(model, optimizer, opt_level="O2", verbosity=0)
parallel = DistributedDataParallel(model, device_ids=[device.index] if on_cuda else None)
with ampkit.scale_loss(F.mse_loss(parallel(x[rank::world_size]), y[rank::world_size]), optimizer) as scaled_loss:
    scaled_loss.backward()
optimizer.step()

changed, expected = changes(model), changes(plain)
distance = float((changed - expected).norm() / expected.norm())
assert distance < 0.02
ampkit.close()
if rank == 0:
    print(f"ddp: {world_size} process(es), step {distance:.2%} from one in float32")
dist.barrier()
dist.destroy_process_group()
