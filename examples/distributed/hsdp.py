"""HSDP: weights sharded in groups of processes, and gradients averaged over the groups, by a mesh of two dimensions.

$ torchrun --nproc_per_node=4 hsdp.py --opt-level O5

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
parser.add_argument("--shards", default=2, type=int, help="processes that hold one copy together: those of a machine")
arguments = parser.parse_args()
level, shards = arguments.opt_level, arguments.shards

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
on_cuda = torch.cuda.device_count() >= world_size
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_cuda else torch.device("cpu")
if on_cuda:
    torch.cuda.set_device(device)
mesh = init_device_mesh(device.type, (world_size // shards, shards), mesh_dim_names=("copies", "shards"))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 1)).to(device)
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
    norm = ampkit.clip_grad_norm_(optimizer, 1.0)  # of all shards of one copy
    optimizer.step()

weights = torch.cat([value.full_tensor().flatten() for value in model.state_dict().values()])  # of this rank's copy
seen = [None] * world_size
dist.all_gather_object(seen, (norm.item(), weights.double().sum().item(), str(ampkit.state_dict())))
if rank == 0:
    agree = len(set(seen)) == 1
    print(f"hsdp {level}: loss {loss.item():.3f}, {mesh.shape[0]} copies, {world_size} ranks agree: {agree}")
ampkit.close()
dist.barrier()
dist.destroy_process_group()
