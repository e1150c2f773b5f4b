"""Gradients averaged by hand. `process_group=` makes all processes step together, or none where one has met an overflow.

$ torchrun --nproc_per_node=2 by_hand.py

Runs on the CPU. Rank 1 meets an infinite loss in one step; prints whether all ranks skipped it and hold the same weights.
"""

import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import ampkit

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = ampkit.initialize(
    model, optimizer, opt_level="O2", verbosity=int(rank == 0), process_group=dist.group.WORLD
)

batches = torch.Generator().manual_seed(1 + rank)  # each rank its own
skipped = 0
for step in range(20):
    x = torch.randn(32, 16, generator=batches)
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), x[:, :1].sin())
    if step == 10 and rank == 1:
        loss = loss * math.inf
    with ampkit.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    for param in model.parameters():
        dist.all_reduce(param.grad)
        param.grad /= world_size
    optimizer.step()
    skipped += ampkit.step_was_skipped(optimizer)

seen = [None] * world_size
dist.all_gather_object(seen, (skipped, *(value.sum().item() for value in model.state_dict().values())))
if rank == 0:
    print(f"by hand: {skipped} step skipped, {world_size} ranks agree: {len(set(seen)) == 1}")
ampkit.close()
dist.barrier()
dist.destroy_process_group()
