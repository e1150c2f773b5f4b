"""A ``scale_loss`` block inside of another, of other optimizers: at the same scale the outer one unscales both."""

import pytest
import torch
from torch import nn

import ampkit

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
X = torch.ones(1, 4)


def two_of_each(level, **settings):
    """Two models without a bias and their optimizers, which share a loss scale."""
    models = [nn.Linear(4, 2, bias=False) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    return ampkit.initialize(models, optimizers, opt_level=level, verbosity=0, **settings)


def found(optimizers):
    """The gradients that steps would use, each of which has one value only."""
    values = [next(iter(ampkit.master_params(optimizer))).grad.unique() for optimizer in optimizers]
    assert all(len(value) == 1 for value in values), values
    return [value.item() for value in values]


def side_by_side(losses, optimizers, ids=(0, 0)):
    with (
        ampkit.scale_loss(losses[0], optimizers[0], loss_id=ids[0]) as first,
        ampkit.scale_loss(losses[1], optimizers[1], loss_id=ids[1]) as second,
    ):
        first.backward(retain_graph=True)
        second.backward()


def inner_last(losses, optimizers, ids=(0, 0)):
    with ampkit.scale_loss(losses[0], optimizers[0], loss_id=ids[0]) as first:
        first.backward(retain_graph=True)
        with ampkit.scale_loss(losses[1], optimizers[1], loss_id=ids[1]) as second:
            second.backward()


def inner_first(losses, optimizers, ids=(0, 0)):
    with ampkit.scale_loss(losses[0], optimizers[0], loss_id=ids[0]) as first:
        with ampkit.scale_loss(losses[1], optimizers[1], loss_id=ids[1]) as second:
            second.backward(retain_graph=True)
        first.backward()


ORDERS = [side_by_side, inner_last, inner_first]


@pytest.mark.parametrize("backward", ORDERS)
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_of_both_blocks_are_unscaled(level, backward):
    models, optimizers = two_of_each(level)
    for _ in range(2):  # the second time, to the gradients of the first
        backward([3 * models[0](X).sum(), 5 * models[1](X).sum()], optimizers)
    assert found(optimizers) == [6.0, 10.0]
    for optimizer in optimizers:
        optimizer.step()  # neither is still open


@pytest.mark.parametrize("backward", ORDERS)
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_of_both_losses_add_up(level, backward):
    models, optimizers = two_of_each(level)
    outputs = [model(X).sum() for model in models]
    backward([3 * outputs[0] + 2 * outputs[1], 5 * outputs[1] + 7 * outputs[0]], optimizers)
    assert found(optimizers) == [10.0, 7.0]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_blocks_of_three_optimizers(level):
    models = [nn.Linear(4, 2, bias=False) for _ in range(3)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    ampkit.initialize(models, optimizers, opt_level=level, verbosity=0)
    losses = [factor * model(X).sum() for factor, model in zip((3, 5, 7), models)]
    with ampkit.scale_loss(losses[0], optimizers[0]) as first:
        with ampkit.scale_loss(losses[1], optimizers[1]) as second:
            with ampkit.scale_loss(losses[2], optimizers[2]) as third:
                third.backward()
            second.backward()
        first.backward()
    assert found(optimizers) == [3.0, 5.0, 7.0]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_an_overflow_in_the_innermost_of_three_skips_all(order):
    models = [nn.Linear(4, 2, bias=False) for _ in range(3)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    ampkit.initialize(models, optimizers, opt_level="O2", verbosity=0)
    losses = [factor * models[i](X).sum() for i, factor in zip(order, (3, 5, float("inf")))]
    with ampkit.scale_loss(losses[0], optimizers[order[0]]) as first:
        with ampkit.scale_loss(losses[1], optimizers[order[1]]) as second:
            with ampkit.scale_loss(losses[2], optimizers[order[2]]) as third:
                third.backward()
            second.backward()
        first.backward()
    for optimizer in optimizers:
        optimizer.step()
    assert [ampkit.step_was_skipped(optimizer) for optimizer in optimizers] == [True] * 3
    assert ampkit.current_session().scalers[0].loss_scale == 2.0**15


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_before_the_outer_block_ends_is_refused(level):
    models, optimizers = two_of_each(level)
    outputs = [model(X).sum() for model in models]
    with pytest.raises(ampkit.ConfigurationError, match="inside the scale_loss block"):
        with ampkit.scale_loss(outputs[0], optimizers[0]):
            with ampkit.scale_loss(outputs[1], optimizers[1]) as second:
                second.backward()
            optimizers[1].step()


def test_an_overflow_inside_skips_both():
    models, optimizers = two_of_each("O2")
    inner_last([3 * models[0](X).sum(), float("inf") * models[1](X).sum()], optimizers)
    for optimizer in optimizers:
        optimizer.step()
    assert [ampkit.step_was_skipped(optimizer) for optimizer in optimizers] == [True, True]
    assert ampkit.current_session().scalers[0].loss_scale == 2.0**15


@pytest.mark.parametrize("backward", ORDERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_another_loss_scale_inside_is_refused_and_leaves_everything_as_it_was(level, backward):
    models, optimizers = two_of_each(level, num_losses=2)
    losses = [3 * models[0](X).sum(), 5 * models[1](X).sum()]
    with pytest.raises(ampkit.ConfigurationError, match=r"with another loss scale.*Leave the first block"):
        backward(losses, optimizers, (0, 1))
    assert [param.grad for model in models for param in model.parameters()] == [None, None]
    backward([3 * models[0](X).sum(), 5 * models[1](X).sum()], optimizers)
    assert found(optimizers) == [3.0, 5.0]


@pytest.mark.parametrize("backward", ORDERS)
@pytest.mark.parametrize("scale", [64.0, 1.0])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_equal_static_scales_are_one(level, scale, backward):
    models, optimizers = two_of_each(level, num_losses=2, loss_scale=scale)
    backward([3 * models[0](X).sum(), 5 * models[1](X).sum()], optimizers, (0, 1))
    assert found(optimizers) == [3.0, 5.0]


@pytest.mark.parametrize("backward", ORDERS)
@pytest.mark.parametrize("levels", [("O5", "O0"), ("O0", "O5"), ("O3", "O4"), ("O4", "O5")])
def test_blocks_of_two_sessions_without_a_loss_scale(levels, backward):
    pairs = []
    for level in levels:
        model = nn.Linear(4, 2, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        pairs.append(ampkit.initialize(model, optimizer, opt_level=level, verbosity=0))
    models, optimizers = zip(*pairs)
    for _ in range(2):
        backward([3 * models[0](X).sum(), 5 * models[1](X).sum()], optimizers)
    assert found(optimizers) == [6.0, 10.0]
