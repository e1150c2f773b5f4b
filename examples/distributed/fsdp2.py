"""FSDP2 at an opt level. The order: model, `fully_shard`, optimizer over the shards, `initialize`.

$ torchrun --nproc_per_node=2 fsdp2.py --opt-level O5

Runs on the CPU where there are fewer GPUs than processes. Prints whether all ranks stepped alike.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import ampkit
from ampkit.parallel import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", default="O5")
level = parser.parse_args().opt_level

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
on_cuda = torch.cuda.device_count() >= world_size
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_cuda else torch.device("cpu")
if on_cuda:
    torch.cuda.set_device(device)
mesh = init_device_mesh(device.type, (world_size,))

torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(2)]
model = nn.Sequential(nn.Linear(16, 64), *blocks, nn.Linear(64, 1)).to(device)
for block in blocks:  # blocks first, the model last, all at one level
    fully_shard(block, opt_level=level, mesh=mesh)
fully_shard(model, opt_level=level, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = ampkit.initialize(model, optimizer, opt_level=level, verbosity=int(rank == 0))

batches = torch.Generator().manual_seed(1 + rank)  # each rank its own
for _ in range(20):
    x = torch.randn(32, 16, generator=batches).to(device)
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), x[:, :1].sin())
    with ampkit.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    norm = ampkit.clip_grad_norm_(optimizer, 1.0)  # of all shards
    optimizer.step()

seen = [None] * world_size
dist.all_gather_object(seen, (norm.item(), ampkit.step_was_skipped(optimizer), str(ampkit.state_dict())))
held = sum(param.to_local().numel() for param in model.parameters())
if rank == 0:
    print(
        f"fsdp2 {level}: loss {loss.item():.3f}, rank 0 holds {held} weights, {world_size} ranks agree: {len(set(seen)) == 1}"
    )
ampkit.close()
dist.barrier()
dist.destroy_process_group()
