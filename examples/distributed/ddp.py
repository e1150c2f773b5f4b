"""DistributedDataParallel at an opt level. The order: model, optimizer, `initialize`, then the wrapper.

$ torchrun --nproc_per_node=2 ddp.py --opt-level O2

Runs on the CPU where there are fewer GPUs than processes. Prints whether all ranks hold the same weights.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ampkit

parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", default="O2")
arguments = parser.parse_args()

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
on_cuda = torch.cuda.device_count() >= world_size
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_cuda else torch.device("cpu")
if on_cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_cuda else "gloo")

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = ampkit.initialize(model, optimizer, opt_level=arguments.opt_level, verbosity=int(rank == 0))
parallel = DistributedDataParallel(model, device_ids=[device.index] if on_cuda else None)

batches = torch.Generator().manual_seed(1 + rank)  # each rank its own
for _ in range(20):
    x = torch.randn(32, 16, generator=batches).to(device)
    optimizer.zero_grad()
    loss = F.mse_loss(parallel(x), x[:, :1].sin())
    with ampkit.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    ampkit.clip_grad_norm_(optimizer, 1.0)
    optimizer.step()

weights = torch.cat([value.flatten() for value in model.state_dict().values()])
of_rank_0 = weights.clone()
dist.broadcast(of_rank_0, src=0)
agree = torch.tensor(float(torch.equal(weights, of_rank_0)), device=device)
dist.all_reduce(agree, dist.ReduceOp.MIN)
if rank == 0:
    print(f"ddp {arguments.opt_level}: loss {loss.item():.3f}, {world_size} ranks agree: {bool(agree)}")
ampkit.close()
dist.barrier()
dist.destroy_process_group()
