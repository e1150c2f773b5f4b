"""Policy gradients in float16 under FSDP2, as reinforcement learning uses it: the weights that generate are those that learn.

$ torchrun --standalone --nproc_per_node=2 policy_gradient.py

The policy learns to count: t + 1 is to follow t. In the middle all is saved, built anew and resumed. Runs on the CPU. Prints the
mean reward, how far the chances of what was generated are from those that learn, and whether the ranks agree.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import ampkit
from ampkit.parallel import fully_shard

rank, level = int(os.environ["RANK"]), dict(opt_level="O2", cast_model_type=torch.float16)
dist.init_process_group("gloo")


def build():
    ampkit.close()
    policy = nn.Sequential(nn.Embedding(10, 32), nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(fully_shard(policy, **level).parameters(), lr=1e-2)
    return ampkit.initialize(policy, optimizer, loss_scale="dynamic", verbosity=int(rank == 0), **level)


def state():
    return dict(zip(("policy", "optimizer"), get_state_dict(policy, optimizer)), ampkit=ampkit.state_dict())


torch.manual_seed(0)
policy, optimizer = build()
draw, folder = torch.Generator().manual_seed(1 + rank), [tempfile.mkdtemp()]  # each rank its own episodes
dist.broadcast_object_list(folder)
for step in range(60):
    if step == 30:
        checkpoint.save(state(), checkpoint_id=folder[0])
        policy, optimizer = build()  # as a new job would
        checkpoint.load(saved := state(), checkpoint_id=folder[0])
        set_state_dict(policy, optimizer, model_state_dict=saved["policy"], optim_state_dict=saved["optimizer"])
        ampkit.load_state_dict(saved["ampkit"])
    tokens, chances = torch.randint(10, (64, 1), generator=draw), []
    for _ in range(8):
        with torch.no_grad():
            chances.append(policy(tokens[:, -1]).softmax(-1))
        tokens = torch.cat([tokens, torch.multinomial(chances[-1], 1, generator=draw)], dim=1)
    rewards = (tokens[:, 1:] == (tokens[:, :-1] + 1) % 10).float()
    learning = policy(tokens[:, :-1]).softmax(-1)
    chosen = learning.log().gather(-1, tokens[:, 1:, None]).squeeze(-1)
    optimizer.zero_grad()
    with ampkit.scale_loss(-((rewards - rewards.mean()) * chosen).mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    norm = ampkit.clip_grad_norm_(optimizer, 1.0)  # of all shards
    optimizer.step()

apart, seen = (learning - torch.stack(chances, 1)).abs().max(), [None] * dist.get_world_size()
dist.all_gather_object(seen, (norm.item(), str(ampkit.state_dict())))
if rank == 0:
    print(f"reward {rewards.mean():.2f}, chances apart {apart:.4f}, {len(seen)} ranks agree: {len(set(seen)) == 1}")
ampkit.close()
dist.destroy_process_group()
