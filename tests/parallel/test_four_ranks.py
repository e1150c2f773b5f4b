"""DDP and FSDP2 on four gloo processes, judged by one process on the joined batch; checkpoints on other numbers of processes."""

import functools
import math
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import as_one_of_two_ranks, backward, net_with_norm, results_of_ranks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ampkit
from ampkit.optimizers import FusedAdam
from ampkit.parallel import fully_shard

pytestmark = pytest.mark.slow

ROWS, MICRO_BATCHES, STEPS, SPOILED = 16, 2, 4, 2
OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "FusedAdam": FusedAdam,
    "int8": functools.partial(FusedAdam, state_dtype="int8"),
}
CASES = [
    *(
        (wrapper, level, name)
        for wrapper in ("ddp", "fsdp2")
        for level in ("O1", "O2", "O5")
        for name in ("AdamW", "FusedAdam")
    ),
    ("fsdp2", "O3", "AdamW"),
]
# By the name of a folder.
SAVED = {"O1": ("O1", "AdamW"), "O5": ("O5", "AdamW"), "O5, moments in 8 bits": ("O5", "int8")}


def data(step, part, rank, count):
    """The rows of a rank in a micro-batch; all ranks together have the same rows, whatever their number."""
    drawn = torch.randn(ROWS, 9, generator=torch.Generator().manual_seed(MICRO_BATCHES * step + part))
    mine = drawn.chunk(count)[rank]
    return mine[:, :6], mine[:, 6:]


def whole(values):
    """Plain copies of tensors, gathered where they are sharded."""
    return {k: (v.full_tensor() if hasattr(v, "full_tensor") else v).detach().clone() for k, v in values.items()}


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
    """Take steps of micro-batches, averaged at last and clipped; the last rank spoils one. Returns skipped steps, and norms."""
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


def saved(rank, count, case, folder):
    """Take two steps, a checkpoint, and two steps more; return the weights then and now."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, called, optimizer = prepared("fsdp2", *SAVED[case])
    take_steps("fsdp2", called, optimizer, range(2), rank, count)
    weights, state = get_state_dict(model, optimizer)
    assert {value.dtype for value in weights.values()} == {torch.float32}
    checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=folder / case)
    then = whole(model.state_dict())
    take_steps("fsdp2", called, optimizer, range(2, 4), rank, count)
    now = whole(model.state_dict())
    ampkit.close()
    return {"then": then, "now": now}


def resumed(rank, count, case, folder):
    """Load the checkpoint of `saved` in other processes, and take the same two steps more; a single process has a whole model."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    wrapper = "fsdp2" if count > 1 else "alone"
    model, called, optimizer = prepared(wrapper, *SAVED[case])
    model(data(0, 0, rank, count)[0])  # what was gathered before is not used after loading
    weights, state = get_state_dict(model, optimizer)
    loaded = {"model": weights, "optimizer": state}
    checkpoint.load(loaded, checkpoint_id=folder / case)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    if count == 2:
        checkpoint.save(loaded, checkpoint_id=folder.parent / "of two" / case)
    then = whole(model.state_dict())
    take_steps(wrapper, called, optimizer, range(2, 4), rank, count)
    now = whole(model.state_dict())
    ampkit.close()
    return {"then": then, "now": now}


def work(rank):
    folder, count = Path(sys.argv[1]), dist.get_world_size()
    checkpoints = folder.parent / "checkpoints" / "of four"
    if folder.name == "again":
        return {case: resumed(rank, count, case, checkpoints) for case in SAVED}
    if count < 4:
        checkpoints = checkpoints.with_name("of four" if count == 2 else "of two")
        return {level: resumed(rank, count, level, checkpoints) for level in ("O1", "O5")}
    return {
        "cases": {str(case): trained(case, rank, count) for case in CASES},
        "saved": {case: saved(rank, count, case, checkpoints) for case in SAVED},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def four(folder):
    (folder / "four").mkdir()
    return results_of_ranks(__file__, folder / "four", 4)


@pytest.fixture(scope="module")
def again(folder, four):
    (folder / "again").mkdir()
    return results_of_ranks(__file__, folder / "again", 4)


@pytest.fixture(scope="module")
def two(folder, four):
    (folder / "two").mkdir()
    return results_of_ranks(__file__, folder / "two", 2)


@pytest.fixture(scope="module")
def one(folder, two):
    (folder / "one").mkdir()
    return results_of_ranks(__file__, folder / "one", 1)


def movement(weights):
    start = net_with_norm().state_dict()
    return torch.cat([(weights[name].double() - start[name].double()).flatten() for name in start])


def assert_moved_alike(found, expected, tolerance):
    one, other = movement(found), movement(expected)
    assert other.norm() > 0 and (one - other).norm() <= tolerance * other.norm(), (one - other).norm() / other.norm()


@pytest.mark.parametrize("case", CASES)
def test_four_ranks_train_as_one_process_on_the_joined_batch(four, case):
    """Accumulate, clip, and skip a step on all ranks that one rank spoils. O3's shards are float32, as O2's masters are."""
    ranks = [rank["cases"][str(case)] for rank in four]
    for other in ranks[1:]:
        assert all(torch.equal(ranks[0]["weights"][name], value) for name, value in other["weights"].items())
        assert (other["skipped"], other["scale"]) == (ranks[0]["skipped"], ranks[0]["scale"])
    assert ranks[0]["skipped"] == [step == SPOILED for step in range(STEPS)] and ranks[0]["scale"] == 2.0**15
    _, level, name = case
    alone = trained(("alone", "O2" if level == "O3" else level, name))
    assert alone["skipped"] == ranks[0]["skipped"]
    assert_moved_alike(ranks[0]["weights"], alone["weights"], 0.03)
    for step, (found, expected) in enumerate(zip(ranks[0]["norms"], alone["norms"])):
        assert step == SPOILED or found == pytest.approx(expected, rel=0.02)


def test_the_comparison_tells_a_rank_that_trains_alone():
    model, called, optimizer = prepared("alone", "O1", "AdamW")
    take_steps("alone", called, optimizer, [0, 1, 3], 0, 4)
    with pytest.raises(AssertionError):
        assert_moved_alike(model.state_dict(), trained(("alone", "O1", "AdamW"))["weights"], 0.1)


@pytest.mark.parametrize("case", SAVED)
def test_checkpoint_of_four_continues_on_four_bit_for_bit(four, again, case):
    straight = four[0]["saved"][case]
    assert movement(straight["then"]).norm() > 0
    for found in (*(rank["saved"][case] for rank in four), *(rank[case] for rank in again)):
        for when in ("then", "now"):
            assert all(torch.equal(found[when][name], value) for name, value in straight[when].items())


@pytest.mark.parametrize("level", ("O1", "O5"))
def test_checkpoint_of_four_continues_on_two_and_on_one(four, two, one, level):
    straight = four[0]["saved"][level]
    for found in (two[0][level], two[1][level], one[0][level]):
        assert all(torch.equal(found["then"][name], value) for name, value in straight["then"].items())
        assert_moved_alike(found["now"], straight["now"], 0.02)
        assert movement(found["now"]).norm() > 1.2 * movement(found["then"]).norm()  # it went on from there


if __name__ == "__main__":
    as_one_of_two_ranks(work)
