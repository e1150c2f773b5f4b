"""Optimizers without a session on several processes: DDP and FSDP2 of a bfloat16 model, checkpoints on another number of them."""

import math
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import as_one_of_two_ranks, assert_moved_alike, results_of_ranks, whole
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
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


def float32_values(model, optimizer):
    return whole(float32_state_dict(model, optimizer))


def continued(way, rank, count, folder):
    """Take three steps and a checkpoint, or load the one that is there; then three steps. The float32 values before and after."""
    model, called, optimizer = prepared(way, "fsdp2")
    resumes = (folder / way).exists()
    if not resumes:
        take_steps(called, optimizer, range(3), rank, count)
    weights, state = get_state_dict(model, optimizer)
    both = {"model": weights, "optimizer": state}
    if resumes:
        checkpoint.load(both, checkpoint_id=folder / way)
        set_state_dict(model, optimizer, model_state_dict=both["model"], optim_state_dict=both["optimizer"])
    else:
        checkpoint.save(both, checkpoint_id=folder / way)
    then = float32_values(model, optimizer)
    take_steps(called, optimizer, range(4, 7), rank, count)
    return {"then": then, "now": float32_values(model, optimizer)}


def work(rank):
    folder, count, results = Path(sys.argv[1]), dist.get_world_size(), {}
    if folder.name == "two":
        for wrapper in ("ddp", "fsdp2"):
            model, called, optimizer = prepared("float32", wrapper)
            take_steps(called, optimizer, range(STEPS), rank, count)
            results[wrapper] = {"values": float32_values(model, optimizer), "skipped": optimizer.skipped_steps}
    return results | {way: continued(way, rank, count, folder.parent / "checkpoints") for way in WAYS}


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
    start = {name: value.float() for name, value in net().state_dict().items()}
    for name, value in float32_values(model, optimizer).items():
        assert torch.equal(ranks[0]["values"][name], ranks[1]["values"][name])
        assert_moved_alike(ranks[0]["values"], {name: value}, {name: start[name]}, 0.1)


@pytest.mark.parametrize("way", WAYS)
def test_a_sharded_checkpoint_goes_on_bit_for_bit_and_on_another_number_of_processes(runs, way):
    straight = runs["two"][0][way]
    again, single = runs["again"][0][way], runs["one"][0][way]
    for name, value in straight["then"].items():
        assert torch.equal(again["then"][name], value) and torch.equal(single["then"][name], value)
        assert torch.equal(again["now"][name], straight["now"][name])
        assert_moved_alike(single["now"], straight["now"], {name: value}, 0.15)


if __name__ == "__main__":
    as_one_of_two_ranks(work)
