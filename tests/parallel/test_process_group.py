"""Gradients averaged by hand over two gloo processes: an overflow on one of them skips the step of both."""

import math

import pytest
import torch
import torch.distributed as dist
from helpers import as_one_of_two_ranks, backward, net_with_norm, results_of_two_ranks
from torch.nn import functional as F

import ampkit
from ampkit.iteration.scale_loss import _CHECKS_RANKS
from ampkit.optimizers import FusedAdam

CASES = [
    (level, fused, delayed) for level in ("O1", "O2", "O5") for fused in (False, True) for delayed in (False, True)
]


def data(step):
    """Both ranks' batches."""
    drawn = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(step))
    return drawn[..., :6], drawn[..., 6:]


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
        x, y = (part[rank] for part in data(step))
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


def apart(rank):
    """Nobody has told initialize() that gradients are averaged, and rank 1 meets an overflow: what do the ranks say of it?"""
    model = net_with_norm()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ampkit.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic", verbosity=0)
    found = []
    for step in range(2):
        x, y = (part[rank] for part in data(step))
        try:
            loss = F.mse_loss(model(x), y)
            backward(loss * math.inf if (step, rank) == (1, 1) else loss, optimizer)
            found.append("")
        except ampkit.LossScaleError as error:
            found.append(str(error))
    ampkit.close()
    return found


def work(rank):
    assert _CHECKS_RANKS  # each of these iterations
    return {
        "apart": apart(rank),
        "cases": {str(case): train(rank, case) for case in CASES},
        "zero": {level: refusal_of_zero(level) for level in ("O0", "O1", "O2", "O4", "O5")},
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AMPKIT_CHECK_RANKS", "1")
        return results_of_two_ranks(__file__, tmp_path_factory.mktemp("group"))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_overflow_on_one_rank_skips_on_both(results, case):
    one, other = (rank["cases"][str(case)] for rank in results)
    assert one["skipped"] == other["skipped"] == [False, True, False, False]
    assert one["scales"] == other["scales"] and one["scales"][1] == one["scales"][0] / 2
    assert all(torch.equal(one["weights"][name], other["weights"][name]) for name in one["weights"])
    # Three steps of float32 on the joined batches of the steps that were taken.
    twin = net_with_norm()
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.0 if case[1] else 1e-2)
    start = {name: value.clone() for name, value in twin.state_dict().items()}
    for step in (0, 2, 3):
        optimizer.zero_grad()
        x, y = (part.flatten(0, 1) for part in data(step))
        F.mse_loss(twin(x), y).backward()
        optimizer.step()
    found, expected = (
        torch.cat([(values[name] - start[name]).flatten() for name in start])
        for values in (one["weights"], twin.state_dict())
    )
    assert (found - expected).norm() <= 0.05 * expected.norm()


@pytest.mark.slow
def test_zero_redundancy_optimizer_trains_without_masters_and_is_refused_with_them(results):
    for rank in results:
        found = rank["zero"]
        assert {found[level] for level in ("O0", "O1", "O4")} == {"moved"}
        for level in ("O2", "O5"):
            assert all(word in found[level] for word in ("ZeroRedundancyOptimizer", level, "FSDP2", "fully_shard"))


@pytest.mark.slow
def test_ranks_whose_scales_differ_are_told(results):
    for rank, found in enumerate(results):
        first, second = found["apart"]
        here = 32768 if rank == 1 else 65536
        assert not first and f"32768 to 65536, {here} here" in second and "process_group=" in second


def test_process_group_that_is_none_is_refused():
    model = net_with_norm()
    with pytest.raises(TypeError, match=r"process_group= as a torch\.distributed\.ProcessGroup, found 'world'"):
        ampkit.initialize(model, opt_level="O1", verbosity=0, process_group="world")
    assert not any("_ampkit" in key for key in vars(model))


if __name__ == "__main__":
    as_one_of_two_ranks(work)
