"""``check_gradients`` under FSDP2, on two gloo processes: non-finite values in the shard of one process skip the step on both."""

import math

import torch
import torch.distributed as dist
from helpers import as_one_of_two_ranks, results_of_two_ranks
from torch import nn
from torch.nn import functional as F

import ampkit
from ampkit.optimizers import FusedAdam
from ampkit.parallel import fully_shard
from ampkit.sharding import local

STEPS, SPOILED = 4, 2
OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "FusedAdam": lambda p: FusedAdam(p, lr=1e-2),
}
# The rank whose shard is spoiled, and with what; whether the loop has a `scale_loss` block.
CASES = [
    (level, name, rank, value, block)
    for level, name in (("O4", "AdamW"), ("O5", "AdamW"), ("O5", "AdamW fused"), ("O5", "FusedAdam"))
    for rank, value, block in ((0, math.nan, True), (1, math.nan, False), (1, -math.inf, True))
]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))


def shards(model, optimizer):
    """Copies of the weights and of the optimizer's state, as far as they lie on this process."""
    states = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    return [local(x).detach().clone() for x in (*model.parameters(), *states)]


def trained(rank, level, name, spoiled_rank, value, block):
    """Return of each step whether it was skipped, whether anything here moved, and how many collectives agreed on that."""
    model = net()
    fully_shard(model[0], opt_level=level)
    fully_shard(model, opt_level=level)
    optimizer = OPTIMIZERS[name](model.parameters())
    settings = {"opt_level": level, "check_gradients": True, "verbosity": 0}
    model, optimizer = ampkit.initialize(model, optimizer, **settings)
    calls, all_reduce, steps = [], dist.all_reduce, []
    dist.all_reduce = lambda *args, **kwargs: calls.append(None) or all_reduce(*args, **kwargs)
    try:
        for step in range(STEPS):
            x, y = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(step))[rank].split([6, 3], dim=1)
            optimizer.zero_grad()
            calls.clear()
            loss = F.mse_loss(model(x).float(), y)
            if block:
                with ampkit.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
            else:
                loss.backward()
            if step == SPOILED and rank == spoiled_rank:  # after gradients are reduced: here alone
                local(model[3].weight.grad).view(-1)[-1] = value
            before = shards(model, optimizer)
            optimizer.step()
            count = len(calls)
            skipped = ampkit.step_was_skipped(optimizer)
            after = shards(model, optimizer)
            moved = len(before) != len(after) or not all(map(torch.equal, before, after))
            steps.append((skipped, moved, count))
    finally:
        dist.all_reduce = all_reduce
    values = {key: value.full_tensor().clone() for key, value in model.state_dict().items()}
    ampkit.close()
    return {"steps": steps, "finite": all(bool(value.isfinite().all()) for value in values.values())}


def test_what_is_not_finite_in_one_shard_skips_on_both_ranks_for_one_collective_a_step(tmp_path):
    ranks = results_of_two_ranks(__file__, tmp_path)
    for case in CASES:
        for rank in ranks:
            found = rank[str(case)]
            assert found["finite"], case
            for step, (skipped, moved, collectives) in enumerate(found["steps"]):
                assert (skipped, moved) == (step == SPOILED, step != SPOILED), (case, step)
                assert collectives == 1, (case, step)


if __name__ == "__main__":
    as_one_of_two_ranks(lambda rank: {str(case): trained(rank, *case) for case in CASES})
