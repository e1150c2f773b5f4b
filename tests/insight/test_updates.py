"""`check_updates` against float64 arithmetic, and on a small language model that was born in bfloat16."""

import gc
import logging
from contextlib import nullcontext

import pytest
import torch
from helpers import backward, initialize_quietly
from torch import nn

import ampkit
from ampkit.insight import updates


def language_model():
    return nn.Sequential(nn.Embedding(16, 16), nn.RMSNorm(16), nn.Linear(16, 16, bias=False)).to(torch.bfloat16)


def train(model, optimizer, steps, after=lambda: None):
    torch.manual_seed(1)
    for _ in range(steps):
        tokens = torch.randint(16, (4, 8))
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        with ampkit.scale_loss(loss, optimizer) if ampkit.current_session() else nullcontext(loss) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        after()


def lost_in_float64(weights, gradients, lr, betas=(0.9, 0.999), eps=1e-8):
    """The share of Adam's updates, computed in float64, that are not 0 and vanish when they are added to a weight in bfloat16."""
    m = v = 0.0
    lost = total = 0
    for step, (weight, gradient) in enumerate(zip(weights, gradients), 1):
        g = gradient.double()
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        update = -lr * (m / (1 - betas[0] ** step)) / ((v / (1 - betas[1] ** step)).sqrt() + eps)
        stays = (weight.double() + update).to(torch.bfloat16) == weight
        lost += int((stays & (g != 0)).sum())
        total += int((g != 0).sum())
    return lost / total


def test_shares_agree_with_float64_and_norm_weights_stay_one(caplog):
    model = language_model()
    optimizer = torch.optim.Adam(model.named_parameters(), lr=1e-5)
    check = ampkit.check_updates(optimizer)
    weights = {name: [param.detach().clone()] for name, param in model.named_parameters()}
    gradients = {name: [] for name in weights}

    def note():
        for name, param in model.named_parameters():
            weights[name].append(param.detach().clone())
            gradients[name].append(param.grad.clone())

    with caplog.at_level(logging.WARNING, "ampkit"):
        train(model, optimizer, 5, note)
    assert check.steps == 5
    for name, share in check.shares.items():
        assert share == pytest.approx(lost_in_float64(weights[name], gradients[name], 1e-5), abs=0.01), name
    assert check.shares["1.weight"] == 1.0 and model[1].weight.unique().tolist() == [1.0]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("100% of the updates of '1.weight' (bfloat16, lr 1e-05) were lost in 5 steps")
    assert 'opt_level="O5"' in line and 'rounding="stochastic"' in line and "2 more tensors lose over 50%" in line
    assert str(check).splitlines()[:2] == ["updates lost in 5 steps", "  100.00%  1.weight"]


@pytest.mark.parametrize("maker", [torch.optim.Adam, torch.optim.RMSprop, ampkit.optimizers.FusedAdam])
def test_at_o5_nothing_is_lost(maker, caplog):
    model, optimizer = initialize_quietly(language_model(), lambda params: maker(params, lr=1e-5), "O5")
    check = ampkit.check_updates(optimizer)
    train(model, optimizer, 5)
    assert check.steps == 5
    # float32 loses an update of 1e-5 at a weight of 100 only. Gradients near 0 make smaller ones.
    assert max(check.shares.values()) < 0.02
    assert not (model[1].weight == 1.0).any()
    assert not [record for record in caplog.records if "updates" in record.getMessage()]


def test_stochastic_rounding_counts_as_no_loss():
    optimizer = ampkit.optimizers.FusedAdam((model := language_model()).parameters(), lr=1e-5, rounding="stochastic")
    check = ampkit.check_updates(optimizer)
    train(model, optimizer, 5)
    assert (check.steps, check.shares) == (0, {})


def test_steps_that_change_nothing_by_intent_are_not_measured():
    model, optimizer = initialize_quietly(
        nn.Linear(2, 1, bias=False), lambda params: torch.optim.SGD(params, lr=0.0), "O1"
    )
    check = ampkit.check_updates(optimizer)
    for lr, factor in ((0.0, 1.0), (0.1, torch.inf), (0.1, 1.0)):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        backward(model(torch.ones(1, 2)).float().sum() * factor, optimizer)
        optimizer.step()
    assert (check.steps, check.shares) == (1, {"weight": 0.0})


def test_weights_of_before_a_step_are_kept_no_longer_than_the_step():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    check = ampkit.check_updates(optimizer)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert check.steps == 1 and not any(type(one) is updates.Weights for one in gc.get_objects())


def test_after_five_steps_every_tenth_one_is_measured_until_it_is_removed():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    check = ampkit.check_updates(optimizer, every=10)
    model(torch.ones(1, 2)).sum().backward()
    for _ in range(25):
        optimizer.step()
    assert check.steps == 7
    check.remove()
    for _ in range(25):
        optimizer.step()
    assert check.steps == 7 and "step" not in vars(optimizer)


def test_float32_weights_that_are_too_large_are_told_of_the_learning_rate(caplog):
    weight = nn.Parameter(torch.full((4,), 1e6))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    ampkit.check_updates(optimizer)
    weight.grad = torch.ones(4)
    for _ in range(5):
        optimizer.step()
    assert "(float32, lr 0.001) were lost in 5 steps: weights in float32 lose them" in caplog.text


def test_bad_arguments_are_refused():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    with pytest.raises(ValueError, match="every=0"):
        ampkit.check_updates(optimizer, every=0)
    with pytest.raises(TypeError, match="check_updates expects the optimizer"):
        ampkit.check_updates(nn.Linear(1, 1))


def test_rests_that_an_optimizer_keeps_by_itself_lose_nothing():
    model = language_model()
    optimizer = ampkit.optimizers.AdamW(model.parameters(), lr=1e-5)
    check = ampkit.check_updates(optimizer)
    train(model, optimizer, 5)
    assert check.steps == 5 and max(check.shares.values()) < 0.02
    (row,) = ampkit.explain(model, optimizer).optimizers
    # 2 for weights, 2 for gradients, 8 for moments and 2 for rests in its state.
    assert (row.masters, row.step, row.total_bytes) == ("bfloat16 weight + 16-bit rest", "one pass", 14.0)
