"""Gradients averaged by hand over two gloo processes: an overflow on one of them skips the step of both."""

import math

import pytest
import torch
import torch.distributed as dist
from helpers import as_one_of_two_ranks, backward, net_with_norm, results_of_two_ranks
from ranks import assert_equal, assert_moved_alike, batches_of_step, in_float32
from torch import nn
from torch.nn import functional as F

import ampkit
from ampkit.optimizers import FusedAdam

CASES = [
    (level, fused, delayed) for level in ("O1", "O2", "O5") for fused in (False, True) for delayed in (False, True)
]


def train(rank, case):
    """Four steps, of which rank 1 meets an infinite loss in the second: weights, who skipped, and the scales."""
    level, fused, delayed = case
    model = net_with_norm()
    optimizer = (FusedAdam if fused else torch.optim.AdamW)(model.parameters(), lr=1e-2)
    ampkit.initialize(
        model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0, process_group=dist.group.WORLD
    )
    skipped, scales = [], []
    for step in range(4):
        x, y = (part[rank] for part in batches_of_step(step))
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        backward(loss * math.inf if (step, rank) == (1, 1) else loss, optimizer, delay_overflow_check=delayed)
        if delayed:
            backward(model(x).sum() * 0, optimizer)
        for param in model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= 2
        optimizer.step()
        skipped.append(ampkit.step_was_skipped(optimizer))
        scales.append(ampkit.state_dict()["loss_scaler0"]["loss_scale"])
    result = {"weights": {name: value.clone() for name, value in model.state_dict().items()}}
    ampkit.close()
    return {**result, "skipped": skipped, "scales": scales}


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


#: Who writes what into gradients after the block, whose finding no longer tells; and over whom the gradients are averaged.
TOUCHED = {
    "written on one rank": "all",
    "written on one rank without averaging": "all, not averaged",
    "overflow elsewhere, process_group= forgotten": None,
    "written in a group of one": "one",
}


def touched(rank, case, level, fused, through_masters):
    """Three steps. In the second, gradients of rank 1 stop being finite: behind the block, but for the forgotten group's."""
    group = {"all": dist.group.WORLD, "one": ALONE[rank] if case == "written in a group of one" else None}
    over = TOUCHED[case]
    given = {} if over is None else {"process_group": group[over.split(",")[0]]}
    model = net_with_norm()
    optimizer = (FusedAdam if fused else torch.optim.AdamW)(model.parameters(), lr=1e-2)
    ampkit.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0, **given)
    found = []
    for step in range(3):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        x, y = (part[rank] for part in batches_of_step(step))
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
        found.append((ampkit.step_was_skipped(optimizer), moved))
    finite = all(value.isfinite().all() for value in model.state_dict().values())
    ampkit.close()
    return {"found": found, "finite": bool(finite)}


def checks_at_steps(rank, by_hand):
    """How often steps check their gradients, of two: averaged by hand, or under DDP, which averages before the block ends."""
    from ampkit.iteration.gradients import Gradients

    taken, original = [], Gradients.check
    Gradients.check = lambda self, found: taken.append(1) or original(self, found)
    model = net_with_norm()
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    ampkit.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic", verbosity=0)
    parallel = model if by_hand else nn.parallel.DistributedDataParallel(model)
    for step in range(2):
        x, y = (part[rank] for part in batches_of_step(step))
        optimizer.zero_grad()
        backward(F.mse_loss(parallel(x), y), optimizer)
        optimizer.step()
    Gradients.check = original
    ampkit.close()
    return len(taken)


def touched_cases():
    return [
        (case, level, fused, through_masters)
        for case in TOUCHED
        for level in ("O1", "O2", "O5")
        for fused in (False, True)
        for through_masters in (False, True)
    ]


def a_rank_without_gradients(rank):
    """Two iterations with ``ampkit.GradScaler``; in the first rank 0 overflows and rank 1 has no gradients: skips and scales."""
    model = net_with_norm()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ampkit.initialize(
        model, optimizer, opt_level="O1", loss_scale="dynamic", verbosity=0, process_group=dist.group.WORLD
    )
    scaler, found = ampkit.GradScaler("cpu"), []
    for step in range(2):
        optimizer.zero_grad()
        if (step, rank) != (0, 1):
            factor = math.inf if step == 0 else 1.0
            scaler.scale(model(batches_of_step(step)[0][rank]).float().square().mean() * factor).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        found.append((ampkit.step_was_skipped(optimizer), scaler.get_scale()))
    ampkit.close()
    return found


def judged_again():
    rank = dist.get_rank()
    ALONE[:] = [dist.new_group([one]) for one in range(2)]
    return {
        "touched": {str(case): touched(rank, *case) for case in touched_cases()},
        "checks": {str(by_hand): checks_at_steps(rank, by_hand) for by_hand in (False, True)},
    }


ALONE = []


def work(rank):
    return {
        **judged_again(),
        "cases": {str(case): train(rank, case) for case in CASES},
        "without gradients": a_rank_without_gradients(rank),
        "zero": {level: refusal_of_zero(level) for level in ("O0", "O1", "O2", "O4", "O5")},
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return results_of_two_ranks(__file__, tmp_path_factory.mktemp("group"))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_overflow_on_one_rank_skips_on_both(results, case):
    one, other = (rank["cases"][str(case)] for rank in results)
    assert one["skipped"] == other["skipped"] == [False, True, False, False]
    assert one["scales"] == other["scales"] and one["scales"][1] == one["scales"][0] / 2
    assert_equal(one["weights"], other["weights"])
    decay = 0.0 if case[1] else 1e-2
    expected = in_float32(lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=decay), (0, 2, 3))
    assert_moved_alike(one["weights"], expected, 0.05, net_with_norm().state_dict())


@pytest.mark.slow
def test_a_rank_without_gradients_follows_the_scale_of_the_others(results):
    assert [rank["without gradients"] for rank in results] == [[(True, 2.0**15), (False, 2.0**15)]] * 2


@pytest.mark.slow
def test_zero_redundancy_optimizer_trains_without_masters_and_is_refused_with_them(results):
    for rank in results:
        found = rank["zero"]
        assert {found[level] for level in ("O0", "O1", "O4", "O5")} == {"moved"}
        assert all(word in found["O2"] for word in ("ZeroRedundancyOptimizer", "O2", "FSDP2", "fully_shard"))


@pytest.mark.slow
@pytest.mark.parametrize("case", touched_cases())
def test_gradients_that_stop_being_finite_behind_the_block_are_not_stepped_with(results, case):
    both = case[0] != "written in a group of one"
    for rank, one in enumerate(found["touched"][str(case)] for found in results):
        skipped = [False, both or rank == 1, False]
        assert one == {"found": [(skip, not skip) for skip in skipped], "finite": True}


@pytest.mark.slow
def test_gradients_are_looked_at_again_only_where_a_script_may_have_averaged_them(results):
    for rank in results:
        assert rank["checks"] == {"False": 0, "True": 2}


@pytest.mark.parametrize("make", [torch.optim.AdamW, FusedAdam])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_nan_written_behind_the_block_skips_the_step_of_a_group_of_one(group_of_one, level, make):
    model = net_with_norm()
    optimizer = make(model.parameters(), lr=1e-2)
    settings = {"loss_scale": 8.0, "verbosity": 0, "process_group": group_of_one}
    ampkit.initialize(model, optimizer, opt_level=level, **settings)
    before = {name: value.clone() for name, value in model.state_dict().items()}
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
    model = net_with_norm()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    ampkit.initialize(model, optimizer, opt_level="O1", loss_scale=8.0, verbosity=0)
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
