"""Accumulation under DistributedDataParallel on two gloo processes, judged by float64 gradients of the joined batch."""

import copy
import itertools
import math

import pytest
import torch
from helpers import as_one_of_two_ranks, net_with_norm, results_of_two_ranks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ampkit
from ampkit.optimizers import FusedSGD

MICRO_BATCHES = 3
# name: (level, delay_unscale, no_sync until the last micro-batch, bucket views, growth interval of the scale, fused optimizer)
CASES = {
    f"{level}{'_delayed' if delayed else ''}{'_no_sync' if no_sync else ''}{'_views' if views else ''}"
    f"{'_growing' if growth == 1 else ''}{'_fused' if fused else ''}": (level, delayed, no_sync, views, growth, fused)
    for (level, fused), delayed, no_sync, views, growth in itertools.product(
        (("O1", False), ("O2", False), ("O2", True)), (False, True), (False, True), (False, True), (1, 2000)
    )
}


def data(rank):
    generator = torch.Generator().manual_seed(7)
    everything = torch.randn(MICRO_BATCHES, 2, 4, 9, generator=generator)
    return [(batch[rank, :, :6], batch[rank, :, 6:]) for batch in everything]


def initialized(case):
    level, _, _, views, growth, fused = CASES[case]
    model = net_with_norm()
    optimizer = (FusedSGD if fused else torch.optim.SGD)(model.parameters(), lr=1.0)
    rule = ampkit.DynamicLossScale(init_scale=8.0, growth_factor=4.0, growth_interval=growth)
    model, optimizer = ampkit.initialize(model, optimizer, opt_level=level, loss_scale=rule, verbosity=0)
    return DistributedDataParallel(model, gradient_as_bucket_view=views), optimizer


def accumulate(ddp, optimizer, rank, case, spoil=None):
    """Run all micro-batches of one step; ``spoil`` is the (rank, micro-batch) whose loss is infinite."""
    _, delayed, no_sync, _, _, _ = CASES[case]
    for index, (x, y) in enumerate(data(rank)):
        last = index == MICRO_BATCHES - 1
        if no_sync and not last:
            with ddp.no_sync():
                loss = F.mse_loss(ddp(x), y)
                loss = loss * math.inf if spoil == (rank, index) else loss
                with ampkit.scale_loss(loss, optimizer, delay_unscale=delayed and not last) as scaled:
                    scaled.backward()
        else:
            loss = F.mse_loss(ddp(x), y)
            loss = loss * math.inf if spoil == (rank, index) else loss
            with ampkit.scale_loss(loss, optimizer, delay_unscale=delayed and not last) as scaled:
                scaled.backward()


def run_case(rank, case):
    ddp, optimizer = initialized(case)
    before = [p.detach().clone() for p in ampkit.master_params(optimizer)]
    accumulate(ddp, optimizer, rank, case)
    optimizer.step()
    results = {"moved": [a - b.detach() for a, b in zip(before, ampkit.master_params(optimizer))]}
    results["skipped"] = ampkit.step_was_skipped(optimizer)

    # Rank 1 alone meets an infinite loss in the first micro-batch: both must skip, and agree on the scale.
    optimizer.zero_grad()
    before = [p.detach().clone() for p in ampkit.master_params(optimizer)]
    scale = ampkit.state_dict()["loss_scaler0"]["loss_scale"]
    accumulate(ddp, optimizer, rank, case, spoil=(1, 0))
    optimizer.step()
    results["skipped_after_overflow"] = ampkit.step_was_skipped(optimizer)
    results["unchanged"] = all(torch.equal(a, b) for a, b in zip(before, ampkit.master_params(optimizer)))
    results["scales"] = (scale, ampkit.state_dict()["loss_scaler0"])
    ampkit.close()
    return results


def work(rank):
    return {case: run_case(rank, case) for case in CASES}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return results_of_two_ranks(__file__, tmp_path_factory.mktemp("ddp"))


def expected_gradients():
    """The mean over ranks of the sum over micro-batches, which is one large batch for these equal sizes."""
    twin = net_with_norm().double()
    for rank in range(2):
        for x, y in data(rank):
            (F.mse_loss(twin(x.double()), y.double()) / 2).backward()
    return [p.grad for p in twin.parameters()]


@pytest.mark.parametrize("case", CASES)
def test_accumulation_equals_one_large_batch_on_every_rank(results, case):
    expected = expected_gradients()
    for rank in range(2):
        found = results[rank][case]
        assert not found["skipped"]
        for mine, theirs in zip(found["moved"], expected, strict=True):
            assert (mine.double() - theirs).abs().max() <= 4e-2 * theirs.abs().max()
    for mine, other in zip(results[0][case]["moved"], results[1][case]["moved"], strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("case", CASES)
def test_overflow_on_one_rank_skips_on_both_and_keeps_their_scales_equal(results, case):
    for rank in range(2):
        assert results[rank][case]["skipped_after_overflow"]
        assert results[rank][case]["unchanged"]
    assert results[0][case]["scales"] == results[1][case]["scales"]


def test_a_rank_that_accumulates_alone_would_be_noticed():
    """The tolerance above tells the joined batch from the batch of one rank: the comparison can fail."""
    twin = copy.deepcopy(net_with_norm()).double()
    for x, y in data(0):
        F.mse_loss(twin(x.double()), y.double()).backward()
    assert any((a.grad - b).abs().max() > 4e-2 * b.abs().max() for a, b in zip(twin.parameters(), expected_gradients()))


if __name__ == "__main__":
    as_one_of_two_ranks(work)
