"""Blocks, clips, clears and steps in orders that are easy to get wrong: as in plain float32 torch, or refused."""

import copy
from contextlib import nullcontext

import pytest
import torch
from helpers import STORED_BF16, at, backward, initialize_quietly, net_with_norm, sgd
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_  # bound before anything is initialized

import ampkit
from ampkit.registry import session_of

X, Y = (torch.randn(16, width, generator=torch.Generator().manual_seed(seed)) for width, seed in ((4, 3), (2, 4)))
at_a_scale = pytest.mark.parametrize("level", ["O1", "O2"])


def plain(lr=0.1):
    model = net_with_norm(4, 8, 2)
    return model, sgd(model.parameters(), lr)


def initialized(level, lr=0.1, **settings):
    return ampkit.initialize(*plain(lr), **at(level, verbosity=0, **settings))


def loss_of(model):
    """The loss is float32 for models that were not initialized, also where a session casts calls of torch."""
    with nullcontext() if session_of(model) else ampkit.disable_casts():
        return F.mse_loss(model(X).float(), Y)


def flat_gradients(model):
    return torch.cat([p.grad.float().flatten() for p in model.parameters()])


CLEARS = {
    "the model": lambda model, optimizer: model.zero_grad(),
    "the optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "each": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
    "the model, in the block": lambda model, optimizer: model.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("clear", CLEARS)
@pytest.mark.parametrize("level", ["O1", "O2", STORED_BF16, "O5"])
def test_a_loop_that_clears_in_the_block_or_has_none_steps_the_newest_gradients(level, clear):
    (model, optimizer), (reference, plain_sgd) = initialized(level), plain()
    for _ in range(5):
        loss = loss_of(model)
        with ampkit.scale_loss(loss, optimizer) if clear.endswith("block") else nullcontext(loss) as passed:
            CLEARS[clear](model, optimizer)
            passed.backward()
        optimizer.step()
        plain_sgd.zero_grad()
        loss_of(reference).backward()
        plain_sgd.step()
    for mine, theirs in zip(ampkit.master_params(optimizer), reference.parameters(), strict=True):
        assert (mine.float() - theirs).abs().max() <= 5e-3


@at_a_scale
def test_step_inside_the_block_is_refused(level):
    model, optimizer = initialized(level)
    before = [p.detach().clone() for p in ampkit.master_params(optimizer)]
    with pytest.raises(ampkit.ConfigurationError, match="inside the scale_loss block"):
        with ampkit.scale_loss(loss_of(model), optimizer) as scaled:
            scaled.backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, ampkit.master_params(optimizer)))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_parts_of_a_model_that_a_delayed_block_does_not_reach_keep_their_gradients(level):
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(4, 2) for _ in range(2))
    before, exact = [p.detach().clone() for p in model.parameters()], copy.deepcopy(model).double()
    sum(F.mse_loss(part(X.double()), Y.double()) for part in exact).backward()
    model, optimizer = initialize_quietly(model, lambda p: sgd(p, 1.0), level)
    for part, delays in zip(model, (False, True)):
        backward(F.mse_loss(part(X).float(), Y), optimizer, delay_unscale=delays)
    optimizer.step()
    for start, p, reference in zip(before, ampkit.master_params(optimizer), exact.parameters(), strict=True):
        error = (start - p.float() - reference.grad).norm()
        # O3's weights are bfloat16 themselves: half a unit in the last place at the start, and one at the step.
        rounding = 2 * 2**-9 * max(start.norm(), p.norm()) if level == "O3" else 0.0
        assert error <= (1e-5 if level == "O0" else 2e-2) * reference.grad.norm() + rounding


@pytest.mark.parametrize("level", ["O1", "O2", STORED_BF16, "O5"])
def test_close_gives_delayed_gradients_back_unscaled_and_none_that_were_cleared(level):
    (model, optimizer), (reference, _) = initialized(level), plain()
    backward(loss_of(model), optimizer, delay_unscale=True)
    ampkit.close()
    loss_of(reference).backward()
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())
    assert (flat_gradients(model) - flat_gradients(reference)).abs().max() <= 2e-2
    model, optimizer = initialized(level)
    backward(loss_of(model), optimizer)
    model.zero_grad()
    ampkit.close()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("level", ["O2", STORED_BF16, "O5"])
def test_gradients_that_are_views_are_cleared_to_zeros(level):
    """torch refuses to detach a view in place: zero_grad was an error."""
    model, optimizer = initialized(level)
    for p in model.parameters():
        p.grad = torch.ones(2 * p.numel(), dtype=p.dtype)[p.numel() :].view_as(p)
    optimizer.zero_grad(set_to_none=False)
    assert not flat_gradients(model).any()


# A block inside of another: one loss scale unscales the gradients of one block


def two_of_each(levels):
    """Return two models without a bias and their optimizers: of one session, or of two where the levels differ."""
    models, make = [nn.Linear(4, 2, bias=False) for _ in range(2)], lambda p: sgd(p, 1.0)
    if levels[0] == levels[1]:
        return initialize_quietly(models, make, levels[0])
    return zip(*(initialize_quietly(model, make, level) for model, level in zip(models, levels)))


def slope_of(models):
    return [None if model.weight.grad is None else model.weight.grad.unique().item() for model in models]


ONES = torch.ones(1, 4)


@pytest.mark.parametrize("inner", [0, 1], ids=["the same optimizer", "another"])
@at_a_scale
def test_a_block_inside_another_of_its_session_is_refused_and_leaves_everything_as_it_was(level, inner):
    models, optimizers = two_of_each((level, level))
    backward(2 * models[0](ONES).sum(), optimizers[0])
    with pytest.raises(ampkit.ConfigurationError, match=r"inside of another scale_loss block\. Leave the first"):
        with ampkit.scale_loss(3 * models[0](ONES).sum(), optimizers[0]):
            with ampkit.scale_loss(5 * models[inner](ONES).sum(), optimizers[inner]):
                raise AssertionError("never entered")
    assert slope_of(models) == [2.0, None]
    for model, optimizer in zip(models, optimizers):
        backward(5 * model(ONES).sum(), optimizer)
        optimizer.step()
    assert slope_of(models) == [7.0, 5.0]


@pytest.mark.parametrize("levels", [("O0", "O0"), ("O5", "O5"), ("O1", "O2"), ("O2", "O1"), ("O0", "O5"), ("O5", "O1")])
def test_blocks_of_two_sessions_or_at_loss_scale_1_may_be_inside_one_another(levels):
    models, optimizers = two_of_each(levels)
    with ampkit.scale_loss(3 * models[0](ONES).sum(), optimizers[0]) as outer:
        backward(5 * models[1](ONES).sum(), optimizers[1])
        outer.backward()
    assert slope_of(models) == [3.0, 5.0]


# Clipping where gradients are still multiplied by the loss scale, which would clip nearly all of them away

#: What measures or clips, and what it makes of gradients.
CLIPS = {
    "clip_grad_norm_": (lambda params: clip_grad_norm_(params, 1e-3), lambda exact: exact / exact.norm() * 1e-3),
    "by its attribute": (lambda params: nn.utils.clip_grad_value_(params, 0.1), lambda exact: exact.clamp(-0.1, 0.1)),
    "by a norm": (
        lambda params: nn.utils.clip_grads_with_norm_(params, 1.0, torch.tensor(2.0)),
        lambda exact: exact / 2,
    ),
    "get_total_norm": (lambda params: nn.utils.get_total_norm([p.grad for p in params]), lambda exact: exact),
}


@at_a_scale
@pytest.mark.parametrize("name", CLIPS)
def test_clipping_is_refused_in_a_block_and_right_after_it(name, level):
    (model, optimizer), (clip, wanted) = initialized(level), CLIPS[name]
    params = list(model.parameters())
    with ampkit.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()
        before = flat_gradients(model)
        with pytest.raises(ampkit.ConfigurationError, match="after the scale_loss block"):
            clip(params)
        assert torch.equal(flat_gradients(model), before)
    exact = flat_gradients(model)
    returned = clip(params)
    assert returned is None or returned.item() == pytest.approx(exact.norm().item(), rel=1e-2)
    torch.testing.assert_close(flat_gradients(model), wanted(exact), rtol=1e-2, atol=1e-6)


def test_clipping_is_refused_while_gradients_wait_after_a_block():
    model, optimizer = initialized("O1")
    backward(loss_of(model), optimizer, delay_unscale=True)
    with pytest.raises(ampkit.ConfigurationError, match="the last block"):
        clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize("level, settings", [(STORED_BF16, {}), ("O5", {}), ("O1", {"loss_scale": 1.0})])
@pytest.mark.parametrize("way", ["in a block", "delayed", "by GradScaler"])
def test_clipping_at_scale_one_is_right_wherever_it_stands(level, settings, way):
    model, optimizer = initialized(level, **settings)
    if way == "by GradScaler":
        ampkit.GradScaler().scale(loss_of(model)).backward()
    else:
        with ampkit.scale_loss(loss_of(model), optimizer, delay_unscale=way == "delayed") as scaled:
            scaled.backward()
            if way == "in a block":
                clip_grad_norm_(model.parameters(), 1e-3)
    if way != "in a block":
        clip_grad_norm_(model.parameters(), 1e-3)
    assert flat_gradients(model).norm().item() == pytest.approx(1e-3, rel=1e-2)


def test_other_models_are_clipped_as_ever():
    model, optimizer = initialized("O1")
    other = nn.Linear(2, 1)
    other.weight.grad = torch.tensor([[3.0, 4.0]])
    with ampkit.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()
        assert clip_grad_norm_(iter([other.weight]), 1.0).item() == 5.0
        assert clip_grad_norm_(other.weight, 1.0).item() == pytest.approx(1.0, rel=1e-5)
    assert other.weight.grad.tolist() == [[pytest.approx(0.6, rel=1e-5), pytest.approx(0.8, rel=1e-5)]]
