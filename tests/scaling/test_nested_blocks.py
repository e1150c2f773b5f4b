"""A ``scale_loss`` block inside of another is refused: one loss scale unscales the gradients of one block."""

import pytest
import torch
from helpers import backward
from torch import nn

import ampkit

X = torch.ones(1, 4)


def two_of_each(levels):
    """Return two models without a bias and their optimizers: of one session, or of two where the levels differ."""
    models = [nn.Linear(4, 2, bias=False) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    if levels[0] == levels[1]:
        ampkit.initialize(models, optimizers, opt_level=levels[0], verbosity=0)
    else:
        for model, optimizer, level in zip(models, optimizers, levels):
            ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
    return models, optimizers


def gradients(models):
    return [None if model.weight.grad is None else model.weight.grad.unique().item() for model in models]


@pytest.mark.parametrize("inner", [0, 1], ids=["the same optimizer", "another"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_block_inside_another_of_its_session_is_refused_and_leaves_everything_as_it_was(level, inner):
    models, optimizers = two_of_each((level, level))
    backward(2 * models[0](X).sum(), optimizers[0])
    with pytest.raises(ampkit.ConfigurationError, match=r"inside of another scale_loss block\. Leave the first"):
        with ampkit.scale_loss(3 * models[0](X).sum(), optimizers[0]):
            with ampkit.scale_loss(5 * models[inner](X).sum(), optimizers[inner]):
                raise AssertionError("never entered")
    assert gradients(models) == [2.0, None]
    for model, optimizer in zip(models, optimizers):
        backward(5 * model(X).sum(), optimizer)
        optimizer.step()
    assert gradients(models) == [7.0, 5.0]


@pytest.mark.parametrize("levels", [("O0", "O0"), ("O5", "O5"), ("O1", "O2"), ("O2", "O1"), ("O0", "O5"), ("O5", "O1")])
def test_blocks_that_share_nothing_may_be_inside_one_another(levels):
    """Blocks of two sessions, or at loss scale 1, where a block holds nothing."""
    models, optimizers = two_of_each(levels)
    with ampkit.scale_loss(3 * models[0](X).sum(), optimizers[0]) as outer:
        backward(5 * models[1](X).sum(), optimizers[1])
        outer.backward()
    assert gradients(models) == [3.0, 5.0]
