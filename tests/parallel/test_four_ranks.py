"""DDP and FSDP2 on four gloo processes, judged by one process on the joined batch; checkpoints on other numbers of processes."""

import math
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import as_one_of_two_ranks, backward, net_with_norm, results_of_ranks
from ranks import assert_equal, assert_moved_alike, movement, read_checkpoint, whole, write_checkpoint
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ampkit
from ampkit.optimizers import FusedAdam
from ampkit.parallel import fully_shard

pytestmark = pytest.mark.slow

ROWS, MICRO_BATCHES, STEPS, SPOILED = 16, 2, 4, 2
OPTIMIZERS = {"AdamW": torch.optim.AdamW, "FusedAdam": FusedAdam}
CASES = [
    *((wrapper, level, name) for wrapper in ("ddp", "fsdp2") for level in ("O1", "O2", "O5") for name in OPTIMIZERS),
    ("fsdp2", "O3", "AdamW"),
]


def data(step, part, rank, count):
    """One micro-batch: the rows of a rank, the same all together for any number of ranks."""
    drawn = torch.randn(ROWS, 9, generator=torch.Generator().manual_seed(MICRO_BATCHES * step + part))
    mine = drawn.chunk(count)[rank]
    return mine[:, :6], mine[:, 6:]


def prepared(wrapper, level, name, **settings):
    """(model, what is called, optimizer), at a scale that checks at every level."""
    model = net_with_norm()
    if wrapper == "fsdp2":
        fully_shard(model[0], opt_level=level)
        fully_shard(model, opt_level=level)
    optimizer = OPTIMIZERS[name](model.parameters(), lr=1e-2)
    settings = {"loss_scale": "dynamic", **settings}
    ampkit.initialize(model, optimizer, opt_level=level, verbosity=0, **settings)
    return model, DistributedDataParallel(model) if wrapper == "ddp" else model, optimizer


def take_steps(wrapper, called, optimizer, steps, rank, count, spoiled=None):
    """Steps of micro-batches whose gradients are averaged at last, clipped; the last rank spoils one. Who skipped, and norms."""
    skipped, norms = [], []
    for step in steps:
        optimizer.zero_grad()
        for part in range(MICRO_BATCHES):
            last = part == MICRO_BATCHES - 1
            if wrapper == "fsdp2":
                called.set_requires_gradient_sync(last)
            with called.no_sync() if wrapper == "ddp" and not last else nullcontext():
                x, y = data(step, part, rank, count)
                loss = F.mse_loss(called(x), y) / MICRO_BATCHES
                infinite = step == spoiled and rank == count - 1 and last
                backward(loss * math.inf if infinite else loss, optimizer)
        norms.append(ampkit.clip_grad_norm_(optimizer, 0.25).item())
        optimizer.step()
        skipped.append(ampkit.step_was_skipped(optimizer))
    return skipped, norms


def trained(case, rank=0, count=1):
    wrapper, level, name = case
    model, called, optimizer = prepared(wrapper, level, name)
    skipped, norms = take_steps(wrapper, called, optimizer, range(STEPS), rank, count, SPOILED)
    scale = ampkit.state_dict()["loss_scaler0"]["loss_scale"]
    result = {"weights": whole(model.state_dict()), "skipped": skipped, "norms": norms, "scale": scale}
    ampkit.close()
    return result


def saved(rank, count, level, folder):
    """Two steps, a checkpoint, and two more steps: the weights then and now."""
    model, called, optimizer = prepared("fsdp2", level, "AdamW")
    take_steps("fsdp2", called, optimizer, range(2), rank, count)
    write_checkpoint(model, optimizer, folder / level)
    return then_and_two_more_steps(model, called, optimizer, rank, count)


def resumed(rank, count, level, folder):
    """What `saved` has written, loaded by other processes, which take the same two more steps."""
    model, called, optimizer = prepared("fsdp2", level, "AdamW")
    read_checkpoint(model, optimizer, folder / level)
    if folder.name == "of four":
        write_checkpoint(model, optimizer, folder.parent / "of two" / level)
    return then_and_two_more_steps(model, called, optimizer, rank, count)


def then_and_two_more_steps(model, called, optimizer, rank, count):
    then = whole(model.state_dict())
    take_steps("fsdp2", called, optimizer, range(2, 4), rank, count)
    now = whole(model.state_dict())
    ampkit.close()
    return {"then": then, "now": now}


def work(rank):
    folder, count = Path(sys.argv[1]), dist.get_world_size()
    checkpoints = folder.parent / "checkpoints" / "of four"
    if count < 4:
        checkpoints = checkpoints.with_name("of four" if count == 2 else "of two")
        return {level: resumed(rank, count, level, checkpoints) for level in ("O1", "O5")}
    return {
        "cases": {str(case): trained(case, rank, count) for case in CASES},
        "saved": {level: saved(rank, count, level, checkpoints) for level in ("O1", "O5")},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def four(folder):
    (folder / "four").mkdir()
    return results_of_ranks(__file__, folder / "four", 4)


@pytest.fixture(scope="module")
def two(folder, four):
    (folder / "two").mkdir()
    return results_of_ranks(__file__, folder / "two", 2)


@pytest.fixture(scope="module")
def one(folder, two):
    (folder / "one").mkdir()
    return results_of_ranks(__file__, folder / "one", 1)


START = net_with_norm().state_dict()


@pytest.mark.parametrize("case", CASES)
def test_four_ranks_train_as_one_process_on_the_joined_batch(four, case):
    """With accumulation, clipping, and a step that one rank spoils and all skip. O3's shards are float32, as O2's masters are."""
    ranks = [rank["cases"][str(case)] for rank in four]
    for other in ranks[1:]:
        assert_equal(other["weights"], ranks[0]["weights"])
        assert (other["skipped"], other["scale"]) == (ranks[0]["skipped"], ranks[0]["scale"])
    assert ranks[0]["skipped"] == [step == SPOILED for step in range(STEPS)] and ranks[0]["scale"] == 2.0**15
    _, level, name = case
    alone = trained(("alone", "O2" if level == "O3" else level, name))
    assert alone["skipped"] == ranks[0]["skipped"]
    assert_moved_alike(ranks[0]["weights"], alone["weights"], 0.03, START)
    for step, (found, expected) in enumerate(zip(ranks[0]["norms"], alone["norms"])):
        assert step == SPOILED or found == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("level", ("O1", "O5"))
def test_checkpoint_of_four_continues_on_two_and_on_one(four, two, one, level):
    straight = four[0]["saved"][level]
    for found in (two[0][level], two[1][level], one[0][level]):
        assert_equal(found["then"], straight["then"])
        assert_moved_alike(found["now"], straight["now"], 0.02, START)
        assert (
            movement(found["now"], START).norm() > 1.2 * movement(found["then"], START).norm()
        )  # it went on from there


if __name__ == "__main__":
    as_one_of_two_ranks(work)
