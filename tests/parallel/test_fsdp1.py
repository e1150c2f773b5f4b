"""FullyShardedDataParallel (FSDP1), and optimizers in the backward pass: right where accepted, refused by name elsewhere."""

import math
import warnings

import pytest
import torch
from helpers import as_one_of_two_ranks, backward, net_with_norm, random_batch, results_of_two_ranks
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn import functional as F

import ampkit
from ampkit.optimizers import FusedLAMB

STEPS, SPOILED = 4, 2


def wrapped(model, **options):
    with warnings.catch_warnings(action="ignore"):
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def data(step):
    """Both ranks' batches."""
    drawn = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(step))
    return drawn[..., :6], drawn[..., 6:]


def float32(skipped=()):
    model = net_with_norm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        x, y = (part.flatten(0, 1) for part in data(step))
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if step not in skipped:
            optimizer.step()
    return {name: value.detach().clone() for name, value in model.named_parameters()}


CASES = [(level, original, lower) for level in ("O0", "O1") for original in (False, True) for lower in (False, True)]


def trained(rank, level, original, lower):
    """Clipped steps; in one of them the last element of the flat gradient, which rank 1 has, is infinite."""
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if lower else None
    model = wrapped(net_with_norm(), use_orig_params=original, mixed_precision=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ampkit.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    skipped = []
    for step in range(STEPS):
        x, y = (part[rank] for part in data(step))
        optimizer.zero_grad()
        loss = F.mse_loss(model(x).float(), y)
        with ampkit.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
            if step == SPOILED and rank == 1:
                [param for param in model.parameters() if param.grad is not None][-1].grad.view(-1)[-1] = math.inf
        model.clip_grad_norm_(0.5)
        optimizer.step()
        skipped.append(ampkit.step_was_skipped(optimizer))
    scale = ampkit.state_dict()["loss_scaler0"]["loss_scale"]
    with FullyShardedDataParallel.summon_full_params(model):
        weights = {name: value.detach().clone() for name, value in model.module.named_parameters()}
    try:
        ampkit.clip_grad_norm_(optimizer, 1.0)
        refusal = ""
    except ampkit.ConfigurationError as error:
        refusal = str(error)
    ampkit.close()
    return {"weights": list(weights.values()), "skipped": skipped, "scale": scale, "refusal": refusal}


def work(rank):
    return {str(case): trained(rank, *case) for case in CASES}


@pytest.mark.slow
def test_two_ranks_train_as_one_and_skip_together_where_one_has_an_inf_in_its_part(tmp_path):
    ranks = results_of_two_ranks(__file__, tmp_path)
    start, expected = list(net_with_norm().parameters()), list(float32([SPOILED]).values())
    wanted = torch.cat([(after - before.detach()).flatten() for before, after in zip(start, expected)])
    for case in CASES:
        one, other = (rank[str(case)] for rank in ranks)
        assert one["skipped"] == other["skipped"] == [step == SPOILED for step in range(STEPS)], case
        assert one["scale"] == other["scale"], case
        assert "model.clip_grad_norm_" in one["refusal"]
        found = torch.cat([value.flatten() for value in one["weights"]])
        assert torch.equal(found, torch.cat([value.flatten() for value in other["weights"]]))
        moved = found - torch.cat([value.detach().flatten() for value in start])
        tolerance = 1e-5 if case[0] == "O0" and not case[2] else 0.03
        assert (moved - wanted).norm() <= tolerance * wanted.norm(), case


@pytest.mark.parametrize("through_wrapper", (False, True))
def test_ranks_of_fsdp1_agree_over_its_process_group(group_of_one, through_wrapper):
    """Whether the wrapper is initialized or what is in it."""
    model = wrapped(net_with_norm(), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampkit.initialize(model if through_wrapper else model.module, optimizer, opt_level="O1", verbosity=0)
    assert ampkit.current_session().process_group is model.process_group


@pytest.mark.parametrize("level", ("O2", "O3", "O5"))
def test_levels_that_cast_weights_refuse_fsdp1_and_name_fsdp2(group_of_one, level):
    model = wrapped(net_with_norm(), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ampkit.ConfigurationError, match=r"FSDP1.*ampkit.parallel.fully_shard"):
        ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)


@pytest.mark.parametrize("original", (False, True))
def test_wrapping_after_initialize_is_refused(group_of_one, original):
    """The optimizer kept the parameters of before, and no weight moved."""
    model = net_with_norm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampkit.initialize(model, optimizer, opt_level="O1", verbosity=0)
    loss = wrapped(model, use_orig_params=original)(random_batch()[0]).float().square().mean()
    with pytest.raises(ampkit.ConfigurationError, match=r"The order is: wrap"):
        backward(loss, optimizer)


def test_optimizer_that_needs_norms_of_whole_parameters_is_refused(group_of_one):
    model = wrapped(net_with_norm(), use_orig_params=True)
    with pytest.raises(ampkit.ConfigurationError, match=r"needs the norm of each whole parameter"):
        ampkit.initialize(model, FusedLAMB(model.parameters()), opt_level="O1", verbosity=0)


@pytest.mark.parametrize("level, settings", (("O1", {}), ("O2", {}), ("O5", {})))
@pytest.mark.parametrize("before", (False, True))
def test_optimizer_in_the_backward_pass_is_refused_where_it_would_step_wrongly(level, settings, before):
    """It stepped with gradients times 65,536, or past masters, which took its steps back."""
    model = net_with_norm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if before:
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    ampkit.initialize(model, optimizer, opt_level=level, verbosity=0, **{"loss_scale": "dynamic", **settings})
    if not before:
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    with pytest.raises(ampkit.ConfigurationError, match=r"_apply_optimizer_in_backward.*Use O4"):
        backward(model(random_batch()[0]).float().square().mean(), optimizer)
    ampkit.close()


def test_optimizer_in_the_backward_pass_steps_at_o4():
    model, twin = net_with_norm(), net_with_norm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    ampkit.initialize(model, optimizer, opt_level="O4", verbosity=0)
    x, y = random_batch()
    backward(F.mse_loss(model(x), y), optimizer)
    ampkit.close()
    F.mse_loss(twin(x), y).backward()
    for param, other in zip(model.parameters(), twin.parameters()):
        assert torch.allclose(param, other - 0.1 * other.grad, atol=2e-3)


if __name__ == "__main__":
    as_one_of_two_ranks(work)
