"""torch's clip_grad_norm_ where gradients are still multiplied by the loss scale: nearly all of them would be clipped away."""

import pytest
import torch
from helpers import STORED_BF16, at, backward, initialize_quietly, random_batch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_  # bound before anything is initialized

import ampkit


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def loss_of(model):
    x, y = random_batch(1)
    return F.mse_loss(model(x).float(), y)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_it_is_refused_in_a_block_and_right_after_it(level):
    model, optimizer = initialize_quietly(net(), sgd, level)
    with ampkit.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()
        before = [p.grad.clone() for p in model.parameters()]
        for clip in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
            with pytest.raises(ampkit.ConfigurationError, match="after the scale_loss block"):
                clip(model.parameters(), 1e-3)
        assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before))
    clip_grad_norm_(model.parameters(), 1e-3)
    norm = torch.linalg.vector_norm(torch.cat([p.grad.float().flatten() for p in model.parameters()]))
    assert norm.item() == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    "use",
    [
        lambda params: nn.utils.clip_grad_value_(params, 0.1),
        lambda params: clip_grad_value_(params, 0.1),
        lambda params: nn.utils.clip_grads_with_norm_(params, 1.0, torch.tensor(2.0)),
        lambda params: nn.utils.get_total_norm([p.grad for p in params]),
    ],
)
def test_what_else_measures_or_clips_is_refused_in_a_block_and_right_after_it(use, level):
    model, optimizer = initialize_quietly(net(), sgd, level)
    params = list(model.parameters())
    with ampkit.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()
        before = [p.grad.clone() for p in params]
        with pytest.raises(ampkit.ConfigurationError, match="after the scale_loss block"):
            use(params)
        assert all(torch.equal(p.grad, grad) for p, grad in zip(params, before))
    exact = [p.grad.float() for p in params]
    returned = use(params)
    norm = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in exact]))
    clipped = torch.cat([p.grad.float().flatten() for p in params])
    assert clipped.abs().max() <= 0.1 or torch.linalg.vector_norm(clipped) <= norm
    assert returned is None or returned.item() == pytest.approx(norm.item(), rel=1e-2)


def test_it_is_refused_while_gradients_wait_after_a_block():
    model, optimizer = initialize_quietly(net(), sgd, "O1")
    backward(loss_of(model), optimizer, delay_unscale=True)
    with pytest.raises(ampkit.ConfigurationError, match="the last block"):
        clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize("settings", [at(STORED_BF16), at("O5"), at("O1", loss_scale=1.0)])
def test_at_scale_one_it_is_right_in_a_block(settings):
    model = net()
    model, optimizer = ampkit.initialize(model, sgd(model.parameters()), verbosity=0, **settings)
    with ampkit.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()
        clip_grad_norm_(model.parameters(), 1e-3)
    norm = torch.linalg.vector_norm(torch.cat([p.grad.float().flatten() for p in model.parameters()]))
    assert norm.item() == pytest.approx(1e-3, rel=1e-2)


def test_other_models_are_clipped_as_ever_and_torch_is_itself_after_close():
    plain = nn.utils.clip_grad.__dict__["_group_tensors_by_device_and_dtype"]
    model, optimizer = initialize_quietly(net(), sgd, "O1")
    other = nn.Linear(2, 1)
    other.weight.grad = torch.tensor([[3.0, 4.0]])
    with ampkit.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()
        assert clip_grad_norm_(iter([other.weight]), 1.0).item() == 5.0
        assert clip_grad_norm_(other.weight, 1.0).item() == pytest.approx(1.0, rel=1e-5)
    assert other.weight.grad.tolist() == [[pytest.approx(0.6, rel=1e-5), pytest.approx(0.8, rel=1e-5)]]
    ampkit.close()
    assert nn.utils.clip_grad.__dict__["_group_tensors_by_device_and_dtype"] is plain


@pytest.mark.parametrize("delays", [True, False])
@pytest.mark.parametrize("level", [STORED_BF16, "O5"])
def test_at_scale_one_gradients_that_wait_are_what_they_are(level, delays):
    model = net()
    model, optimizer = ampkit.initialize(model, sgd(model.parameters()), **at(level, verbosity=0))
    if delays:
        backward(loss_of(model), optimizer, delay_unscale=True)
    else:
        ampkit.GradScaler().scale(loss_of(model)).backward()
    assert clip_grad_norm_(model.parameters(), 1e-3).isfinite()
