"""Gradients averaged over two gloo processes, by hand and by hooks of DDP: an overflow on one of them skips the step of both."""

import math
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import (
    STORED_BF16,
    as_one_of_two_ranks,
    assert_moved_alike,
    at,
    backward,
    net_with_norm,
    results_of_ranks,
    whole,
)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ampkit
from ampkit.optimizers import FusedAdam

LEVELS = {
    **{level: {"opt_level": level} for level in ("O1", "O2", "O5")},
    "O2 in float16": {"opt_level": "O2", "cast_model_type": torch.float16, "loss_scale": 1024.0},
    STORED_BF16: at(STORED_BF16),
}
# In whole groups rank 1 meets an infinite loss. Others have the level's own loss scale, and tell initialize of no group.
IN_GROUPS = ("at once", "delayed")
CASES = [
    *((level, fused, how) for level in ("O1", "O2", "O5") for fused in (False, True) for how in IN_GROUPS),
    *((level, fused, how) for level in LEVELS for fused in (False, True) for how in ("two blocks", "through data")),
]


def begun(level, fused=False, **settings):
    """Return a model and its optimizer, initialized."""
    model = net_with_norm()
    optimizer = (FusedAdam if fused else torch.optim.AdamW)(model.parameters(), lr=1e-2)
    return ampkit.initialize(model, optimizer, verbosity=0, **{**LEVELS.get(level, {"opt_level": level}), **settings})


def data(step):
    """Both ranks' batches."""
    drawn = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(step))
    return drawn[..., :6], drawn[..., 6:]


def blocks_of(step, how, rank=None):
    """The batches of a step's blocks, of one rank or of both joined."""
    both = [data(step), data(step + 4)] if how == "two blocks" else [data(step)]
    return [[part.flatten(0, 1) if rank is None else part[rank] for part in batch] for batch in both]


def train(rank, case):
    """Take four steps; rank 1 may meet an infinite loss in the second. Returns weights, skipped steps, and the scales."""
    level, fused, how = case
    group = {"loss_scale": "dynamic", "process_group": dist.group.WORLD} if how in IN_GROUPS else {}
    model, optimizer = begun(level, fused, **group)
    skipped, scales = [], []
    for step in range(4):
        optimizer.zero_grad()
        for x, y in blocks_of(step, how, rank):
            loss = F.mse_loss(model(x).float(), y)
            spoiled = group and (step, rank) == (1, 1)
            backward(loss * math.inf if spoiled else loss, optimizer, delay_overflow_check=how == "delayed")
        if how == "delayed":
            backward(model(x).sum() * 0, optimizer)
        for param in model.parameters():
            gradient = param.grad.data if how == "through data" else param.grad
            dist.all_reduce(gradient)
            gradient /= 2
        optimizer.step()
        skipped.append(ampkit.step_was_skipped(optimizer))
        scales.append(ampkit.state_dict()["loss_scaler0"]["loss_scale"])
    weights = whole(model.state_dict())
    ampkit.close()
    return {"weights": weights, "skipped": skipped, "scales": scales}


HOOKS = {"none": allreduce_hook, "fp16": fp16_compress_hook, "bf16": bf16_compress_hook}
SENT = [("O0", "none"), ("O1", "none"), ("O1", "fp16"), ("O1", "bf16"), ("O2", "none"), ("O5", "none")]


def train_with_hook(rank, level, hook):
    """Take four steps under DDP; rank 1 spoils the second. Returns weights, skipped steps, and the bytes that each step sent."""
    rule = ampkit.DynamicLossScale(init_scale=2.0**8)  # gradients times 2^16 would not fit into a hook's float16
    model, optimizer = begun(level, loss_scale=rule)
    parallel = DistributedDataParallel(model)
    parallel.register_comm_hook(None, HOOKS[hook])
    original, sent, skipped = dist.all_reduce, [], []

    def all_reduce(tensor, *args, **kwargs):
        sent[-1] += tensor.nbytes
        return original(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce  # which the hooks call
    for step in range(4):
        sent.append(0)
        x, y = (part[rank] for part in data(step))
        optimizer.zero_grad()
        loss = F.mse_loss(parallel(x), y)
        backward(loss * math.inf if (step, rank) == (1, 1) else loss, optimizer)
        optimizer.step()
        skipped.append(ampkit.step_was_skipped(optimizer))
    dist.all_reduce = original
    weights = whole(model.state_dict())
    ampkit.close()
    return {"weights": weights, "skipped": skipped, "bytes": sent}


def refusal_of_zero(level):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = net_with_norm()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    try:
        ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
    except ampkit.ConfigurationError as error:
        return str(error)
    model(torch.ones(2, 6)).square().mean().backward()
    optimizer.step()
    moved = any(not torch.equal(p, b) for p, b in zip(model.parameters(), before))
    ampkit.close()
    return "moved" if moved else "stood still"


#: Who writes what into gradients after the block, whose flag is then out of date; and over whom the gradients are averaged.
TOUCHED = {
    "written on one rank": "all",
    "written on one rank without averaging": "all, not averaged",
    "overflow elsewhere, process_group= forgotten": None,
    "written in a group of one": "one",
}


def touched(rank, case, level, fused, through_masters):
    """Take three steps. In the second, gradients of rank 1 stop being finite: after the block, except for the forgotten group."""
    group = {"all": dist.group.WORLD, "one": ALONE[rank] if case == "written in a group of one" else None}
    over = TOUCHED[case]
    settings = {} if over is None else {"process_group": group[over.split(",")[0]]}
    model, optimizer = begun(level, fused, loss_scale="dynamic", **settings)
    steps = []
    for step in range(3):
        before = whole(model.state_dict())
        x, y = (part[rank] for part in data(step))
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        spoiled = (step, rank) == (1, 1)
        backward(loss * math.inf if spoiled and over is None else loss, optimizer)
        params = list(ampkit.master_params(optimizer)) if through_masters else list(model.parameters())
        if spoiled and over is not None:
            params[0].grad[0, 0] = math.nan
        for param in params if over in ("all", None) else ():
            dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)  # which torch counts as no write
        optimizer.step()
        moved = any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
        steps.append((ampkit.step_was_skipped(optimizer), moved))
    finite = all(value.isfinite().all() for value in model.state_dict().values())
    ampkit.close()
    return {"found": steps, "finite": bool(finite)}


TOUCHED_CASES = [
    (case, level, fused, through_masters)
    for case in TOUCHED
    for level in ("O1", "O2", "O5")
    for fused in (False, True)
    for through_masters in (False, True)
]


def a_rank_without_gradients(rank):
    """Return skips and scales of two iterations with GradScaler; in the first, rank 0 overflows and rank 1 has no gradients."""
    model, optimizer = begun("O1", loss_scale="dynamic", process_group=dist.group.WORLD)
    scaler, steps = ampkit.GradScaler("cpu"), []
    for step in range(2):
        optimizer.zero_grad()
        if (step, rank) != (0, 1):
            factor = math.inf if step == 0 else 1.0
            scaler.scale(model(data(step)[0][rank]).float().square().mean() * factor).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        steps.append((ampkit.step_was_skipped(optimizer), scaler.get_scale()))
    ampkit.close()
    return steps


#: The group of each rank alone.
ALONE = []


def work(rank):
    if Path(sys.argv[1]).name.startswith("cases"):
        return {str(case): train(rank, case) for case in CASES}
    ALONE[:] = [dist.new_group([one]) for one in range(2)]
    return {
        "touched": {str(case): touched(rank, *case) for case in TOUCHED_CASES},
        "hooks": {str(case): train_with_hook(rank, *case) for case in SENT},
        "without gradients": a_rank_without_gradients(rank),
        "zero": {level: refusal_of_zero(level) for level in ("O0", "O1", "O2", "O4", "O5")},
    }


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    return results_of_ranks(__file__, tmp_path_factory.mktemp("cases"))


@pytest.mark.parametrize("case", CASES)
def test_ranks_train_as_in_float32_and_an_overflow_on_one_skips_on_both(averaged, case):
    rank0, rank1 = (rank[str(case)] for rank in averaged)
    _, fused, how = case
    skips = how in IN_GROUPS
    assert rank0["skipped"] == rank1["skipped"] == [False, skips, False, False]
    assert rank0["scales"] == rank1["scales"] and rank0["scales"][1] == rank0["scales"][0] / (2 if skips else 1)
    steps = (0, 2, 3) if skips else range(4)
    assert_as_float32([rank0, rank1], [blocks_of(step, how) for step in steps], 0.0 if fused else 1e-2)


def assert_as_float32(ranks, steps, weight_decay=1e-2, tolerance=0.05):
    """Assert that weights are equal on both ranks, and as in float32 after these steps, each over joined batches."""
    rank0, rank1 = (rank["weights"] for rank in ranks)
    assert all(torch.equal(rank0[name], rank1[name]) for name in rank0)
    twin = net_with_norm()
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=weight_decay)
    start = {name: value.clone() for name, value in twin.state_dict().items()}
    for blocks in steps:
        optimizer.zero_grad()
        for x, y in blocks:
            F.mse_loss(twin(x), y).backward()
        optimizer.step()
    assert_moved_alike(rank0, twin.state_dict(), start, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("level, hook", SENT)
def test_gradients_travel_in_the_precision_of_weights_or_of_the_hook(ranks, level, hook):
    """The layers have 6 * 8 + 8 and 8 * 3 + 3 values; a norm has 16, which is float32 at O2."""
    layers, norm = 6 * 8 + 8 + 8 * 3 + 3, 16
    expected = 2 * layers + 4 * norm if level == "O2" else (4 if hook == "none" else 2) * (layers + norm)
    hooked = [rank["hooks"][str((level, hook))] for rank in ranks]
    for rank in hooked:
        assert rank["bytes"] == [expected] * 4 and rank["skipped"] == [False, True, False, False]
    assert_as_float32(hooked, [blocks_of(step, "") for step in (0, 2, 3)], tolerance=1e-4 if level == "O0" else 0.05)


@pytest.mark.slow
def test_a_rank_without_gradients_follows_the_scale_of_the_others(ranks):
    assert [rank["without gradients"] for rank in ranks] == [[(True, 2.0**15), (False, 2.0**15)]] * 2


@pytest.mark.slow
def test_zero_redundancy_optimizer_trains_without_masters_and_is_refused_with_them(ranks):
    for rank in ranks:
        found = rank["zero"]
        assert {found[level] for level in ("O0", "O1", "O4", "O5")} == {"moved"}
        assert all(word in found["O2"] for word in ("ZeroRedundancyOptimizer", "O2", "FSDP2", "fully_shard"))


@pytest.mark.slow
@pytest.mark.parametrize("case", TOUCHED_CASES)
def test_gradients_that_stop_being_finite_behind_the_block_are_not_stepped_with(ranks, case):
    both = case[0] != "written in a group of one"
    for rank, one in enumerate(results["touched"][str(case)] for results in ranks):
        skipped = [False, both or rank == 1, False]
        assert one == {"found": [(skip, not skip) for skip in skipped], "finite": True}


def test_overflows_at_every_sync_end_training_whatever_comes_under_no_sync(group_of_one):
    model, optimizer = begun("O1", False, loss_scale="dynamic", min_loss_scale=2.0**16)
    called = DistributedDataParallel(model)
    with pytest.raises(ampkit.LossScaleError, match="50 steps in a row"):
        for index in range(2 * 51):
            with called.no_sync() if index % 2 == 0 else nullcontext():
                backward(called(data(0)[0][0]).float().sum() * (1.0 if index % 2 == 0 else math.inf), optimizer)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_nan_written_behind_the_block_skips_the_step_of_a_group_of_one(group_of_one, level, fused):
    model, optimizer = begun(level, fused, loss_scale=8.0, process_group=group_of_one)
    before = whole(model.state_dict())
    for spoiled in (True, False):
        optimizer.zero_grad()
        backward(model(torch.ones(2, 6)).square().mean(), optimizer)
        if spoiled:
            model[0].weight.grad[0, 0] = math.nan
        optimizer.step()
        assert ampkit.step_was_skipped(optimizer) is spoiled
        same = [torch.equal(value, before[name]) for name, value in model.state_dict().items()]
        assert all(same) if spoiled else not any(same)
    ampkit.close()


@pytest.mark.parametrize("processes", [1, 2])
def test_what_torch_counts_as_no_write_is_looked_for_where_there_are_several_processes(
    group_of_one, monkeypatch, processes
):
    monkeypatch.setattr(dist, "get_world_size", lambda *_: processes)
    model, optimizer = begun("O1", loss_scale=8.0)
    backward(model(torch.ones(2, 6)).square().mean(), optimizer)
    gradient = model[0].weight.grad
    with torch.autograd._unsafe_preserve_version_counter(gradient):  # as a collective writes
        gradient[0, 0] = math.nan
    optimizer.step()
    assert ampkit.step_was_skipped(optimizer) is (processes > 1)
    ampkit.close()


def test_process_group_that_is_none_is_refused():
    model = net_with_norm()
    with pytest.raises(TypeError, match=r"process_group= as a torch\.distributed\.ProcessGroup, found 'world'"):
        ampkit.initialize(model, opt_level="O1", verbosity=0, process_group="world")
    assert not any("_ampkit" in key for key in vars(model))


if __name__ == "__main__":
    as_one_of_two_ranks(work)
