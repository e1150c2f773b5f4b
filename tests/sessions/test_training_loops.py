"""Loops as scripts write them, in orders that are easy to get wrong, against plain float32 torch."""

import copy
import logging
import math
from contextlib import nullcontext

import pytest
import torch
from helpers import STORED_BF16, at, backward
from torch import nn
from torch.nn import functional as F

import ampkit
from ampkit.registry import session_of

X, Y = (
    torch.randn(16, 4, generator=torch.Generator().manual_seed(3)),
    torch.randn(16, 2, generator=torch.Generator().manual_seed(4)),
)
SCALED = ("O1", "O2")
ALL = ("O0", "O1", "O2", "O3", "O4", "O5")


class NormThenLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 2)

    def forward(self, x):
        return self.linear(self.norm(x))


def plain(lr=0.1):
    torch.manual_seed(0)
    model = NormThenLinear()
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def initialized(level, lr=0.1, **settings):
    return ampkit.initialize(*plain(lr), **at(level, verbosity=0, **settings))


def loss_of(model):
    """The loss is float32 for models that were not initialized, also where a session casts calls of torch."""
    with nullcontext() if session_of(model) else ampkit.disable_casts():
        return F.mse_loss(model(X).float(), Y)


def block(model, optimizer, factor=1.0, **flags):
    backward(loss_of(model) * factor, optimizer, **flags)


def assert_weights_close(optimizer, reference, tolerance=5e-3):
    for mine, theirs in zip(ampkit.master_params(optimizer), reference.parameters(), strict=True):
        assert (mine.float() - theirs).abs().max() <= tolerance


@pytest.mark.parametrize("level", SCALED)
def test_zero_grad_of_the_model_inside_the_block_clears(level):
    model, optimizer = initialized(level)
    reference, sgd = plain()
    for _ in range(4):
        with ampkit.scale_loss(loss_of(model), optimizer) as scaled:
            model.zero_grad(set_to_none=False)
            scaled.backward()
        optimizer.step()
        sgd.zero_grad()
        loss_of(reference).backward()
        sgd.step()
    assert_weights_close(optimizer, reference)


@pytest.mark.parametrize("level", SCALED)
def test_step_inside_the_block_is_refused(level):
    model, optimizer = initialized(level)
    before = [p.detach().clone() for p in ampkit.master_params(optimizer)]
    with pytest.raises(ampkit.ConfigurationError, match="inside the scale_loss block"):
        with ampkit.scale_loss(loss_of(model), optimizer) as scaled:
            scaled.backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, ampkit.master_params(optimizer)))


@pytest.mark.parametrize("level", ["O1", "O2", STORED_BF16, "O5"])
@pytest.mark.parametrize("pending", ["delayed", "without scale_loss"])
def test_clipping_while_gradients_are_pending_clips_the_step(level, pending):
    model, optimizer = initialized(level, lr=1.0)
    if pending == "delayed":
        block(model, optimizer, delay_unscale=True)
    else:
        loss_of(model).backward()
    torch.nn.utils.clip_grad_norm_(ampkit.master_params(optimizer), 0.01)
    before = [p.detach().clone() for p in ampkit.master_params(optimizer)]
    optimizer.step()
    moved = math.sqrt(
        sum((a - b.detach()).square().sum().item() for a, b in zip(before, ampkit.master_params(optimizer)))
    )
    assert math.isclose(moved, 0.01, rel_tol=1e-3)


@pytest.mark.parametrize(
    "level, clear", [("O1", "model"), ("O2", "optimizer"), ("O2", "each"), (STORED_BF16, "model"), ("O5", "each")]
)
def test_loop_without_scale_loss_steps_the_newest_gradients(level, clear):
    model, optimizer = initialized(level)
    reference, sgd = plain()
    for _ in range(5):
        if clear == "each":
            for p in model.parameters():
                p.grad = None
        else:
            (model if clear == "model" else optimizer).zero_grad()
        loss_of(model).backward()
        optimizer.step()
        sgd.zero_grad()
        loss_of(reference).backward()
        sgd.step()
    assert_weights_close(optimizer, reference)


@pytest.mark.parametrize("level", ALL)
def test_parts_of_a_model_that_a_delayed_block_does_not_reach_keep_their_gradients(level):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x):
            return self.a(x), self.b(x)

    torch.manual_seed(0)
    model = Two()
    before, exact = [p.detach().clone() for p in model.parameters()], copy.deepcopy(model).double()
    sum(F.mse_loss(output, Y.double()) for output in exact(X.double())).backward()
    model, optimizer = ampkit.initialize(
        model, torch.optim.SGD(model.parameters(), lr=1.0), opt_level=level, verbosity=0
    )
    with ampkit.scale_loss(F.mse_loss(model(X)[0].float(), Y), optimizer) as scaled:
        scaled.backward()
    with ampkit.scale_loss(F.mse_loss(model(X)[1].float(), Y), optimizer, delay_unscale=True) as scaled:
        scaled.backward()
    optimizer.step()
    for start, p, reference in zip(before, ampkit.master_params(optimizer), exact.parameters(), strict=True):
        error = (start - p.float() - reference.grad).norm()
        # O3's weights are bfloat16 themselves: half a unit in the last place at the start, and one at the step.
        rounding = 2 * 2**-9 * max(start.norm(), p.norm()) if level == "O3" else 0.0
        assert error <= (1e-5 if level == "O0" else 2e-2) * reference.grad.norm() + rounding


@pytest.mark.parametrize("level", ["O1", "O2", STORED_BF16, "O5"])
def test_close_with_delayed_gradients_gives_them_back_unscaled(level):
    model, optimizer = initialized(level)
    reference, _ = plain()
    block(model, optimizer, delay_unscale=True)
    ampkit.close()
    loss_of(reference).backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert mine.grad.dtype is torch.float32
        assert (mine.grad - theirs.grad).abs().max() <= 2e-2


@pytest.mark.parametrize("level", ["O1", "O2", STORED_BF16, "O5"])
def test_gradients_cleared_before_close_stay_cleared(level):
    model, optimizer = initialized(level)
    block(model, optimizer)
    model.zero_grad()
    ampkit.close()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("level", SCALED)
def test_exception_with_optimizers_that_share_parameters_puts_gradients_back(level):
    torch.manual_seed(0)
    model = NormThenLinear()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    model, optimizers = ampkit.initialize(model, optimizers, opt_level=level, verbosity=0)
    block(model, optimizers)
    before = [p.grad for p in model.parameters()]
    with pytest.raises(KeyError), ampkit.scale_loss(loss_of(model), optimizers) as scaled:
        scaled.backward()
        raise KeyError
    assert all(p.grad is g is not None for p, g in zip(model.parameters(), before))


@pytest.mark.parametrize("level", SCALED)
def test_overflow_whose_check_was_delayed_to_the_step_skips_it(level):
    model, optimizer = initialized(level)
    block(model, optimizer, math.inf, delay_overflow_check=True)
    optimizer.step()
    assert ampkit.step_was_skipped(optimizer)
    assert all(p.isfinite().all() for p in ampkit.master_params(optimizer))


@pytest.mark.parametrize("level", ["O2", STORED_BF16, "O5"])
def test_gradients_that_are_views_are_cleared_to_zeros(level):
    """torch refuses to detach a view in place: zero_grad was an error."""
    model, optimizer = initialized(level)
    flat = torch.ones(sum(p.numel() for p in model.parameters()), dtype=next(model.parameters()).dtype)
    start = 0
    for p in model.parameters():
        p.grad = flat[start : start + p.numel()].view_as(p).to(p.dtype)
        start += p.numel()
    optimizer.zero_grad(set_to_none=False)
    assert not any(p.grad.any() for p in model.parameters())


def test_a_loss_in_lower_precision_at_o5_is_told_of_once(caplog):
    """torch's own cross_entropy, as a script that has bound it before `initialize` calls it."""
    from torch.nn.functional import cross_entropy

    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampkit.initialize(model, optimizer, opt_level="O5", verbosity=0)
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    with caplog.at_level(logging.WARNING, "ampkit"):
        for loss_of in (torch.nn.functional.cross_entropy, cross_entropy, cross_entropy):
            with ampkit.scale_loss(loss_of(model(x), y), optimizer) as scaled:
                scaled.backward()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "torch.bfloat16" in line and "cast_model_outputs=torch.float32" in line
