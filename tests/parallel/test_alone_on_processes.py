"""Optimizers without a session on several processes: DDP and FSDP2 of a bfloat16 model, checkpoints on another number of them."""

import math
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import as_one_of_two_ranks, results_of_ranks
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ampkit.optimizers import AdamW, float32_state_dict

pytestmark = pytest.mark.slow

ROWS, STEPS, SPOILED = 16, 6, 3
WAYS = {"float32": {}, "int8": {"state_dtype": "int8"}}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1)).to(torch.bfloat16)


def prepared(way, wrapper):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = net()
    called = DistributedDataParallel(model) if wrapper == "ddp" else model
    if wrapper == "fsdp2":
        fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    return model, called, AdamW(model.parameters(), lr=1e-3, max_norm=1.0, **WAYS[way])


def take_steps(called, optimizer, steps, rank=0, count=1):
    for step in steps:
        x = torch.randn(ROWS, 9, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
        y = x.float().sum(1, keepdim=True).sin()
        x, y = x.chunk(count)[rank], y.chunk(count)[rank]
        optimizer.zero_grad()
        loss = F.mse_loss(called(x).float(), y)
        if step == SPOILED and rank == count - 1:
            loss = loss * math.inf
        loss.backward()
        optimizer.step()


def whole(model, optimizer):
    values = float32_state_dict(model, optimizer)
    return {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in values.items()}


def checkpointed(way, rank, count, folder):
    """Take three steps, a checkpoint, and three steps more; return the float32 values then and now."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, called, optimizer = prepared(way, "fsdp2")
    take_steps(called, optimizer, range(3), rank, count)
    weights, state = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=folder / way)
    then = whole(model, optimizer)
    take_steps(called, optimizer, range(4, 7), rank, count)
    return {"then": then, "now": whole(model, optimizer)}


def resumed(way, rank, count, folder):
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, called, optimizer = prepared(way, "fsdp2")
    weights, state = get_state_dict(model, optimizer)
    loaded = {"model": weights, "optimizer": state}
    checkpoint.load(loaded, checkpoint_id=folder / way)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    then = whole(model, optimizer)
    take_steps(called, optimizer, range(4, 7), rank, count)
    return {"then": then, "now": whole(model, optimizer)}


def work(rank):
    folder, count = Path(sys.argv[1]), dist.get_world_size()
    checkpoints, results = folder.parent / "checkpoints", {}
    if count == 2 and not checkpoints.exists():
        for wrapper in ("ddp", "fsdp2"):
            model, called, optimizer = prepared("float32", wrapper)
            take_steps(called, optimizer, range(STEPS), rank, count)
            results[wrapper] = {"values": whole(model, optimizer), "skipped": optimizer.skipped_steps}
        dist.barrier()
        return {**results, **{way: checkpointed(way, rank, count, checkpoints) for way in WAYS}}
    return {way: resumed(way, rank, count, checkpoints) for way in WAYS}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    results = {}
    for name, count in (("two", 2), ("again", 2), ("one", 1)):
        (folder / name).mkdir()
        results[name] = results_of_ranks(__file__, folder / name, count)
    return results


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_two_ranks_learn_what_one_does_and_skip_together(runs, wrapper):
    ranks = [rank[wrapper] for rank in runs["two"]]
    assert [rank["skipped"] for rank in ranks] == [1, 1]
    model, called, optimizer = prepared("float32", "none")
    take_steps(called, optimizer, range(STEPS))
    start = net().state_dict()
    for name, value in whole(model, optimizer).items():
        assert torch.equal(ranks[0]["values"][name], ranks[1]["values"][name])
        moved, expected = ranks[0]["values"][name] - start[name].float(), value - start[name].float()
        assert (moved - expected).norm() <= 0.1 * expected.norm()


@pytest.mark.parametrize("way", WAYS)
def test_a_sharded_checkpoint_goes_on_bit_for_bit_and_on_another_number_of_processes(runs, way):
    straight = runs["two"][0][way]
    again, single = runs["again"][0][way], runs["one"][0][way]
    for name, value in straight["then"].items():
        assert torch.equal(again["then"][name], value) and torch.equal(single["then"][name], value)
        assert torch.equal(again["now"][name], straight["now"][name])
        moved, expected = single["now"][name] - value, straight["now"][name] - value
        assert (moved - expected).norm() <= 0.15 * expected.norm()


if __name__ == "__main__":
    as_one_of_two_ranks(work)
