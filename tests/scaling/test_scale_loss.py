"""scale_loss: what arrives in the gradients, whatever the mix of losses, scales, flags and overflows.

The gradients expected are those of the same arithmetic in float64, or worked out on paper.
"""

import contextlib
import copy
import math
import weakref

import pytest
import torch
from helpers import (
    LEVELS,
    STORED_BF16,
    assert_skips,
    backward,
    backward_of_one_weight,
    everything,
    initialize_quietly,
    net_with_norm,
    one_weight,
    random_batch,
    sgd,
)
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn import functional as F

import ampkit
from ampkit.optimizers import FusedSGD

pytestmark = pytest.mark.switch

# Gradients are computed from bfloat16 activations: 8 bits of significand.
TOLERANCE = {level: 1e-6 if level == "O0" else 3e-2 for level in LEVELS}


def batches(count):
    return [random_batch(seed) for seed in range(1, count + 1)]


def reference_gradients(model, data, weights=None):
    """Gradients of the weighted sum of MSE losses, in float64."""
    twin = copy.deepcopy(model).double()
    for (x, y), weight in zip(data, weights or [1.0] * len(data)):
        (weight * F.mse_loss(twin(x.double()), y.double())).backward()
    return [p.grad for p in twin.parameters()]


def with_float32_twin(level, make=sgd, **settings):
    """Return a copy of the model as it was before, the initialized model, its optimizer."""
    before = net_with_norm()
    return before, *initialize_quietly(net_with_norm(), make, level, **settings)


def gradients(optimizer):
    return [p.grad for p in ampkit.master_params(optimizer)]


def assert_close_to_largest(found, expected, tolerance):
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected):
        scale = theirs.abs().max().item()
        assert mine.dtype in (torch.float32, torch.bfloat16)
        assert (mine.double() - theirs).abs().max().item() <= tolerance * max(scale, 1e-3)


@pytest.mark.parametrize("delay_unscale", [False, True])
def test_an_optimizer_that_is_named_twice_is_unscaled_once(delay_unscale):
    before, model, optimizer = with_float32_twin("O1", loss_scale=64.0)
    (x, y) = random_batch()
    backward(F.mse_loss(model(x), y), [optimizer, optimizer], delay_unscale=delay_unscale)
    assert_close_to_largest(gradients(optimizer), reference_gradients(before, [(x, y)]), TOLERANCE["O1"])


@pytest.mark.parametrize("loss_scale", [64.0, "dynamic"])
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_are_unscaled_at_every_level(level, loss_scale):
    before, model, optimizer = with_float32_twin(level, loss_scale=loss_scale)
    [(x, y)] = data = batches(1)
    backward(F.mse_loss(model(x), y), optimizer)
    assert_close_to_largest(gradients(optimizer), reference_gradients(before, data), TOLERANCE[level])


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_several_losses_with_their_own_scales_add_up(level):
    before, model, optimizer = with_float32_twin(level, loss_scale="dynamic", num_losses=3)
    ampkit.load_state_dict({f"loss_scaler{i}": {"loss_scale": 2.0 ** (6 + 3 * i), "unskipped": 0} for i in range(3)})
    data = batches(3)
    for loss_id, (x, y) in enumerate(data):
        with ampkit.scale_loss((loss_id + 1) * F.mse_loss(model(x), y), optimizer, loss_id=loss_id) as scaled:
            expected = 2.0 ** (6 + 3 * loss_id) * (loss_id + 1) * F.mse_loss(model(x), y).item()
            assert math.isclose(scaled.item(), expected, rel_tol=1e-5)
            scaled.backward()
    assert_close_to_largest(gradients(optimizer), reference_gradients(before, data, [1.0, 2.0, 3.0]), TOLERANCE[level])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_parameters_in_two_optimizers_are_unscaled_once(level):
    before, model = net_with_norm(), net_with_norm()
    optimizers = [sgd(model.parameters()), sgd(model[0].parameters())]
    ampkit.initialize(model, optimizers, opt_level=level, verbosity=0)
    data = batches(2)
    for x, y in data:
        backward(F.mse_loss(model(x), y), optimizers)
    expected = reference_gradients(before, data)
    assert_close_to_largest(gradients(optimizers[0]), expected, TOLERANCE[level])
    assert_close_to_largest(gradients(optimizers[1]), expected[:2], TOLERANCE[level])


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("named_first", [True, False], ids=["named first", "named last"])
def test_overflow_skips_an_unnamed_optimizer_of_the_same_parameters(level, named_first):
    model = net_with_norm()
    named, other = sgd(model.parameters()), sgd(model[0].parameters(), momentum=0.9)
    ampkit.initialize(model, [named, other], opt_level=level, loss_scale="dynamic", verbosity=0)
    overflow(model, named)
    for optimizer in (named, other) if named_first else (other, named):
        assert_skips(model, optimizer)
    model.zero_grad()
    x, y = random_batch(seed=1)
    backward(F.mse_loss(model(x), y), named)
    other.step()
    assert not ampkit.step_was_skipped(other)


@pytest.mark.parametrize("shape", [(), (1,), (4, 3)])
def test_loss_of_any_shape_is_yielded_as_float32_times_the_scale(shape):
    _, _, optimizer = with_float32_twin("O2", loss_scale=8.0)
    loss = torch.full(shape, 1.5, dtype=torch.bfloat16, requires_grad=True)
    with ampkit.scale_loss(loss, optimizer) as scaled:
        assert scaled.dtype is torch.float32
        assert torch.equal(scaled, torch.full(shape, 12.0))


def overflow(model, optimizer, **flags):
    x, y = random_batch(seed=9)
    loss = F.mse_loss(model(x), y)
    backward(loss * math.inf, optimizer, **flags)


@pytest.mark.parametrize("flags", [{}, {"delay_overflow_check": True}], ids=str)
@pytest.mark.parametrize("loss_scale", ["dynamic", 32.0])
@pytest.mark.parametrize("level", LEVELS)
def test_overflow_leaves_weights_masters_and_optimizer_state_untouched(level, loss_scale, flags):
    _, model, optimizer = with_float32_twin(level, lambda p: torch.optim.Adam(p, lr=0.1), loss_scale=loss_scale)
    for x, y in batches(2):
        optimizer.zero_grad()
        backward(F.mse_loss(model(x), y), optimizer)
        optimizer.step()
    assert not ampkit.step_was_skipped(optimizer)
    assert len(everything(model, optimizer)) > 10
    optimizer.zero_grad()
    overflow(model, optimizer, **flags)
    assert_skips(model, optimizer)
    assert ampkit.state_dict()["loss_scaler0"]["loss_scale"] == (32.0 if loss_scale == 32.0 else 32768.0)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("flags", [{}, {"delay_unscale": True}, {"delay_overflow_check": True}], ids=str)
def test_overflow_in_an_early_micro_batch_skips_the_step(level, flags):
    _, model, optimizer = with_float32_twin(level, num_losses=2)
    overflow(model, optimizer, **flags)
    [(x, y)] = batches(1)
    backward(F.mse_loss(model(x), y), optimizer, loss_id=0 if flags else 1)
    assert_skips(model, optimizer)
    scales = [state["loss_scale"] for state in ampkit.state_dict().values()]
    assert scales == [2.0**15, 2.0**16]


@pytest.mark.parametrize("layer", [1, 3], ids=["norm", "last"])
@pytest.mark.parametrize("make", [torch.optim.SGD, FusedSGD])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_overflow_in_the_last_micro_batch_skips_the_step(level, make, layer):
    """Gradients of earlier batches are there already: each new gradient is checked as it is added, in every parameter."""
    _, model, optimizer = with_float32_twin(level, lambda p: make(p, lr=0.1))
    x, y = batches(1)[0]
    backward(F.mse_loss(model(x), y), optimizer)
    model[layer].weight.register_hook(lambda gradient: gradient * math.inf)
    backward(F.mse_loss(model(x), y), optimizer)
    assert_skips(model, optimizer)


def two_models(level, make=torch.optim.SGD):
    """Return two models with their optimizers, of one session."""
    return list(zip(*initialize_quietly([net_with_norm(), net_with_norm()], lambda p: make(p, lr=0.1), level)))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_overflow_in_one_model_skips_the_steps_of_all_optimizers_of_the_loss(level):
    (a, of_a), (b, of_b) = both = two_models(level)
    x, y = batches(1)[0]
    a[3].weight.register_hook(lambda gradient: gradient * math.inf)
    backward(F.mse_loss(a(x) + b(x), y), [of_a, of_b])
    for model, optimizer in both:
        assert_skips(model, optimizer)


@pytest.mark.parametrize("make", [torch.optim.SGD, FusedSGD, torch.optim.RMSprop])
def test_overflow_whose_check_was_delayed_skips_both_steps_and_moves_the_scale_once(make):
    """The overflow is passed on to another optimizer's block, with finite gradients. RMSprop's step does not check itself."""
    (a, of_a), (b, of_b) = both = two_models("O2", make)
    overflow(a, of_a, delay_overflow_check=True)
    assert ampkit.state_dict()["loss_scaler0"] == {"loss_scale": 65536.0, "unskipped": 0}
    x, y = random_batch()
    backward(F.mse_loss(b(x), y), of_b)
    for model, optimizer in both:
        assert ampkit.state_dict()["loss_scaler0"] == {"loss_scale": 32768.0, "unskipped": 0}
        assert_skips(model, optimizer)
    assert ampkit.state_dict()["loss_scaler0"] == {"loss_scale": 32768.0, "unskipped": 0}


def test_one_exit_is_one_iteration_and_delayed_ones_are_none():
    _, model, optimizer = with_float32_twin("O2")
    for flags in ({}, {}, {"delay_unscale": True}, {"delay_overflow_check": True}, {}):
        backward(F.mse_loss(model(batches(1)[0][0]), batches(1)[0][1]), optimizer, **flags)
    assert ampkit.state_dict()["loss_scaler0"]["unskipped"] == 3


def test_gradients_that_wait_follow_the_scale_of_a_block_that_fails():
    model, optimizer = one_weight(opt_level="O0", loss_scale=8.0)
    backward_of_one_weight(model, optimizer, 1.0, delay_unscale=True)
    assert model.weight.grad.item() == 8.0
    ampkit.current_session().scalers[0].loss_scale = 2.0
    with pytest.raises(KeyError), ampkit.scale_loss(model(torch.ones(1, 1)).sum(), optimizer, delay_unscale=True):
        raise KeyError
    assert model.weight.grad.item() == 2.0
    backward_of_one_weight(model, optimizer, 1.0)
    assert model.weight.grad.item() == 2.0  # two of 1


@pytest.mark.parametrize("level, accumulated", [*((level, True) for level in LEVELS), ("O1", False), ("O2", False)])
@pytest.mark.parametrize("count", [1, 2], ids=["an optimizer", "two of the same parameters"])
def test_exception_inside_puts_gradients_and_scale_back(level, accumulated, count):
    model = net_with_norm()
    optimizers = [sgd(model.parameters()) for _ in range(count)]
    ampkit.initialize(model, optimizers, opt_level=level, loss_scale="dynamic", verbosity=0)
    x, y = batches(1)[0]
    if accumulated:
        backward(F.mse_loss(model(x), y), optimizers)
    masters_before = [None if g is None else g.clone() for g in gradients(optimizers[0])]
    model_before = [p.grad for p in model.parameters()]
    copies = [None if g is None else g.clone() for g in model_before]
    state = ampkit.state_dict()
    with pytest.raises(KeyError), ampkit.scale_loss(F.mse_loss(model(x), y), optimizers) as scaled:
        scaled.backward()
        raise KeyError("a script's own mistake")
    for param, expected in zip(model.parameters(), model_before):
        assert param.grad is expected
    for found, expected in ((model_before, copies), (gradients(optimizers[0]), masters_before)):
        for gradient, before in zip(found, expected, strict=True):
            assert gradient is before is None or torch.equal(gradient, before)
    assert ampkit.state_dict() == state
    backward(F.mse_loss(model(x), y), optimizers)
    optimizers[0].step()
    assert not ampkit.step_was_skipped(optimizers[0])


@pytest.mark.parametrize("level, settings", [("O1", {}), ("O2", {"loss_scale": 1.0}), ("O5", {"loss_scale": 128.0})])
def test_an_optimizer_in_the_backward_pass_is_refused_where_it_would_step_wrongly(level, settings):
    """The optimizer would meet gradients at the loss scale, or write to weights without their rests."""
    model = net_with_norm()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    model, optimizer = initialize_quietly(model, sgd, level, **settings)
    x, y = batches(1)[0]
    with pytest.raises(ampkit.ConfigurationError, match="put into the backward pass"):
        ampkit.scale_loss(F.mse_loss(model(x), y), optimizer)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_a_block_is_held_after_it(fails):
    """The loss holds the graph, which holds the activations of a whole forward pass."""
    model, optimizer = initialize_quietly(nn.Linear(4, 2), sgd, "O2", loss_scale=128.0)
    with contextlib.suppress(KeyError), ampkit.scale_loss(model(torch.ones(1, 4)).sum(), optimizer) as scaled:
        gone = weakref.ref(scaled)
        scaled.backward()
        if fails:
            raise KeyError
    del scaled
    assert gone() is None


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_training_does_without_numpy_which_torch_does_not_bring(level, monkeypatch):
    def refuse(tensor, *args, **kwargs):
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(torch.Tensor, "numpy", refuse)
    monkeypatch.setattr(torch.Tensor, "__array__", refuse)
    model, optimizer = initialize_quietly(net_with_norm(), sgd, level)
    [(x, y)] = batches(1)
    for factor in (1.0, float("inf")):
        backward(F.mse_loss(model(x), y) * factor, optimizer)
        optimizer.step()
        assert ampkit.step_was_skipped(optimizer) == (factor != 1.0)
    assert ampkit.state_dict()["loss_scaler0"] == {"loss_scale": 32768.0, "unskipped": 0}


def test_gradients_that_wait_at_a_scale_of_one_are_checked_at_a_scale_set_since():
    model, optimizer = initialize_quietly(net_with_norm(), sgd, STORED_BF16, check_gradients=False)
    backward(model(torch.ones(2, 6)).float().sum() * math.inf, optimizer, delay_unscale=True)
    ampkit.current_session().scalers[0].loss_scale = 4.0
    assert_skips(model, optimizer)
