"""A ``scale_loss`` block inside of another, of other optimizers: each unscales what is its own."""

import pytest
import torch
from torch import nn

import ampkit

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
SCALES = (2.0**16, 2.0**10)
X = torch.ones(1, 4)


def two_of_each(level, scales=SCALES):
    """Two models without a bias and their optimizers, whose losses have loss scales of their own."""
    models = [nn.Linear(4, 2, bias=False) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    models, optimizers = ampkit.initialize(models, optimizers, opt_level=level, verbosity=0, num_losses=2)
    for scaler, scale in zip(ampkit.current_session().scalers, scales):
        if scaler.dynamic:
            scaler.loss_scale = scale
    return models, optimizers


def found(optimizers):
    """The gradients that steps would use, each of which has one value only."""
    values = [next(iter(ampkit.master_params(optimizer))).grad.unique() for optimizer in optimizers]
    assert all(len(value) == 1 for value in values), values
    return [value.item() for value in values]


def side_by_side(losses, optimizers):
    with (
        ampkit.scale_loss(losses[0], optimizers[0], loss_id=0) as first,
        ampkit.scale_loss(losses[1], optimizers[1], loss_id=1) as second,
    ):
        first.backward(retain_graph=True)
        second.backward()


def inner_last(losses, optimizers):
    with ampkit.scale_loss(losses[0], optimizers[0], loss_id=0) as first:
        first.backward(retain_graph=True)
        with ampkit.scale_loss(losses[1], optimizers[1], loss_id=1) as second:
            second.backward()


def inner_first(losses, optimizers):
    with ampkit.scale_loss(losses[0], optimizers[0], loss_id=0) as first:
        with ampkit.scale_loss(losses[1], optimizers[1], loss_id=1) as second:
            second.backward(retain_graph=True)
        first.backward()


@pytest.mark.parametrize("backward", [side_by_side, inner_last, inner_first])
@pytest.mark.parametrize("level", LEVELS)
def test_each_block_unscales_what_it_names(level, backward):
    models, optimizers = two_of_each(level)
    for _ in range(2):  # the second time, to the gradients of the first
        backward([3 * models[0](X).sum(), 5 * models[1](X).sum()], optimizers)
    assert found(optimizers) == [6.0, 10.0]


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_of_the_outer_loss_add_to_those_of_the_inner(level):
    models, optimizers = two_of_each(level)
    outputs = [model(X).sum() for model in models]
    inner_first([3 * outputs[0] + 7 * outputs[1], 5 * outputs[1]], optimizers)
    assert found(optimizers) == [3.0, 12.0]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_optimizer_may_step_between_the_inner_block_and_the_outer_backward(level):
    models, optimizers = two_of_each(level)
    outputs = [model(X).sum() for model in models]
    before = next(models[1].parameters()).detach().float().clone()
    with ampkit.scale_loss(3 * outputs[0] + 7 * outputs[1], optimizers[0], loss_id=0) as first:
        with ampkit.scale_loss(0.5 * outputs[1], optimizers[1], loss_id=1) as second:
            second.backward(retain_graph=True)
        optimizers[1].step()
        optimizers[1].zero_grad()
        first.backward(inputs=list(models[0].parameters()))
    assert torch.allclose(next(models[1].parameters()).float(), before - 0.5, atol=0.01)
    assert found(optimizers[:1]) == [3.0]


@pytest.mark.parametrize("backward", [side_by_side, inner_last])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_two_loss_scales_in_one_gradient_are_refused(level, backward):
    """The inner loss comes to what the outer block names, by another scale."""
    models, optimizers = two_of_each(level)
    outputs = [model(X).sum() for model in models]
    with pytest.raises(ampkit.ConfigurationError, match="one inside the other"):
        backward([3 * outputs[0], 5 * outputs[1] + 7 * outputs[0]], optimizers)
    assert [param.grad for model in models for param in model.parameters()] == [None, None]
    inner_first([3 * models[0](X).sum(), 5 * models[1](X).sum()], optimizers)
    assert found(optimizers) == [3.0, 5.0]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_one_loss_scale_in_a_gradient_of_both_is_taken(level):
    models, optimizers = two_of_each(level, scales=(1024.0, 1024.0))
    outputs = [model(X).sum() for model in models]
    side_by_side([3 * outputs[0] + 2 * outputs[1], 5 * outputs[1] + 7 * outputs[0]], optimizers)
    assert found(optimizers) == [10.0, 7.0]


def test_an_overflow_inside_skips_the_inner_optimizer_alone():
    models, optimizers = two_of_each("O2")
    inner_last([3 * models[0](X).sum(), float("inf") * models[1](X).sum()], optimizers)
    for optimizer in optimizers:
        optimizer.step()
    assert [ampkit.step_was_skipped(optimizer) for optimizer in optimizers] == [False, True]
    assert [scaler.loss_scale for scaler in ampkit.current_session().scalers] == [SCALES[0], SCALES[1] / 2]


@pytest.mark.parametrize("backward", [side_by_side, inner_last, inner_first])
@pytest.mark.parametrize("levels", [("O2", "O0"), ("O0", "O2"), ("O1", "O4"), ("O4", "O1")])
def test_blocks_of_two_sessions_of_which_one_scales_nothing(levels, backward):
    pairs = []
    for level in levels:
        model = nn.Linear(4, 2, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        pairs.append(ampkit.initialize(model, optimizer, opt_level=level, verbosity=0, num_losses=2))
    models, optimizers = zip(*pairs)
    for _ in range(2):
        backward([3 * models[0](X).sum(), 5 * models[1](X).sum()], optimizers)
    assert found(optimizers) == [6.0, 10.0]
