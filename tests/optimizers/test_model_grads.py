"""``initialize(..., model_grads="scaled")``: gradients of weights with masters stay at the loss scale, as Apex left them."""

import pytest
import torch
from helpers import backward_of_one_weight, one_weight
from torch import nn

import ampkit
from ampkit.optimizers import FusedAdam, FusedLAMB, FusedSGD

SCALE = 2.0**10


def scaled_weight(make_optimizer=torch.optim.SGD, **settings):
    settings = dict(opt_level="O2", loss_scale=SCALE, model_grads="scaled") | settings
    return one_weight(0.0, make_optimizer, **settings)


def master_of(optimizer):
    return next(ampkit.master_params(optimizer)).item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, FusedSGD])
def test_gradients_stay_at_their_scale_and_the_step_divides(make_optimizer, dtype):
    model, optimizer = scaled_weight(make_optimizer, cast_model_type=dtype)
    for step in range(1, 3):
        backward_of_one_weight(model, optimizer, 2.0**-4)
        assert model.weight.grad.item() == 2.0**-4 * SCALE
        optimizer.step()
        assert master_of(optimizer) == -step * 2.0**-4
        optimizer.zero_grad()


@pytest.mark.parametrize("make_optimizer", [FusedAdam, FusedLAMB])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_both_settings_train_to_the_same_bits(make_optimizer, dtype):
    found = []
    for model_grads in ("scaled", "unscaled"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
        optimizer = make_optimizer(model.parameters(), lr=1e-2)
        ampkit.initialize(model, optimizer, opt_level="O2", cast_model_type=dtype, model_grads=model_grads, verbosity=0)
        for step in range(3):
            for block in range(1 + step):  # also several blocks before a step
                loss = (
                    model(torch.randn(5, 8, generator=torch.Generator().manual_seed(7 * step + block))).square().mean()
                )
                with ampkit.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            ampkit.clip_grad_norm_(optimizer, 0.1)
            optimizer.step()
            optimizer.zero_grad()
        found.append([p.detach().clone() for p in ampkit.master_params(optimizer)])
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


def test_a_gradient_that_was_written_to_is_an_error_that_says_what_to_do():
    model, optimizer = scaled_weight()
    backward_of_one_weight(model, optimizer, 2.0**-4)
    model.weight.grad *= 0.5
    with pytest.raises(ampkit.ConfigurationError, match=r"model_grads='scaled'.*master_params"):
        optimizer.step()
    with pytest.raises(ampkit.ConfigurationError, match="model_grads='scaled'"):
        backward_of_one_weight(model, optimizer, 2.0**-4)


@pytest.mark.parametrize("clear", [lambda p: setattr(p, "grad", None), lambda p: p.grad.zero_()], ids=["None", "zeros"])
def test_clearing_a_gradient_is_no_error(clear):
    model, optimizer = scaled_weight()
    backward_of_one_weight(model, optimizer, 2.0**-4)
    clear(model.weight)
    optimizer.step()
    assert master_of(optimizer) == 0.0
    backward_of_one_weight(model, optimizer, 2.0**-5)
    optimizer.step()
    assert master_of(optimizer) == -(2.0**-5)


@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, FusedSGD])
def test_masters_gradients_are_unscaled_and_may_be_written_to(make_optimizer):
    model, optimizer = scaled_weight(make_optimizer)
    backward_of_one_weight(model, optimizer, 2.0**-4)
    (master,) = ampkit.master_params(optimizer)
    assert master.grad.item() == 2.0**-4
    master.grad *= 0.5
    optimizer.step()
    assert master_of(optimizer) == -(2.0**-5)


@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, FusedSGD])
def test_clip_grad_norm_sees_unscaled_gradients(make_optimizer):
    model, optimizer = scaled_weight(make_optimizer)
    backward_of_one_weight(model, optimizer, 2.0)
    assert ampkit.clip_grad_norm_(optimizer, 1.0).item() == 2.0
    optimizer.step()
    assert abs(master_of(optimizer) + 1.0) < 1e-5


@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, FusedSGD])
def test_several_blocks_add_up_in_float32(make_optimizer):
    model, optimizer = scaled_weight(make_optimizer, cast_model_type=torch.bfloat16)
    for slope in (1.0, 2.0**-9, 2.0**-9):
        backward_of_one_weight(model, optimizer, slope)
    assert model.weight.grad.item() == SCALE  # 1 + 2^-8 rounds to even
    optimizer.step()
    assert master_of(optimizer) == -(1.0 + 2.0**-8)


@pytest.mark.parametrize("look", [False, True])
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, FusedSGD])
def test_gradients_that_stay_after_a_step_are_unscaled_for_the_next(make_optimizer, blocks, look):
    model, optimizer = scaled_weight(make_optimizer)
    for _ in range(blocks):
        backward_of_one_weight(model, optimizer, 1.0)
    for step in range(1, 3):
        assert not look or next(ampkit.master_params(optimizer)).grad.item() == blocks
        optimizer.step()
        assert master_of(optimizer) == -step * blocks
    backward_of_one_weight(model, optimizer, 1.0)
    optimizer.step()
    assert master_of(optimizer) == -3 * blocks - 1


def test_a_delayed_block_before_and_after_a_plain_one():
    model, optimizer = scaled_weight()
    for delay in (True, False, True, False):
        backward_of_one_weight(model, optimizer, 0.25, delay_unscale=delay)
    assert model.weight.grad.item() == SCALE
    optimizer.step()
    assert master_of(optimizer) == -1.0


@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, FusedSGD])
def test_an_overflow_skips_the_step_and_leaves_nothing(make_optimizer):
    model, optimizer = scaled_weight(make_optimizer, loss_scale="dynamic")
    for slope in (0.25, float("inf"), 0.25):
        backward_of_one_weight(model, optimizer, slope)
        optimizer.step()
        optimizer.zero_grad()
    assert master_of(optimizer) == -0.5


def test_without_masters_it_is_refused():
    model = nn.Linear(1, 1)
    with pytest.raises(ampkit.ConfigurationError, match="model_grads='scaled' is about weights with masters"):
        ampkit.initialize(model, opt_level="O1", model_grads="scaled", verbosity=0)
    with pytest.raises(ampkit.ConfigurationError, match="expected 'unscaled'"):
        ampkit.initialize(model, opt_level="O2", model_grads="as apex", verbosity=0)
