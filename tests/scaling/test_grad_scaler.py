"""torch.amp.GradScaler: the stand-in for it, judged by `scale_loss` and by float32; and scales that go there and back."""

import math
from contextlib import nullcontext

import pytest
import torch
from helpers import initialize_quietly, iterate, net_with_norm, random_batch, sgd, whole
from torch import nn
from torch.nn import functional as F

import ampkit
from ampkit.optimizers import FusedAdam

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "FusedAdam": lambda params: FusedAdam(params, lr=0.01),
}
RULE = ampkit.DynamicLossScale(init_scale=256.0, growth_interval=2)


def loss_of(model, step, spoiled=()):
    x, y = random_batch(seed=step)
    return F.mse_loss(model(x).float(), y) * (math.inf if step in spoiled else 1.0)


def assert_equal(found, expected):
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def frameworks_step(scaler, optimizer, loss):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def test_an_overflow_does_not_stay_where_no_optimizer_clears_it():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)  # the bias has none
    ampkit.initialize(model, optimizer, opt_level="O1", loss_scale=RULE, verbosity=0)
    scaler, x = ampkit.GradScaler("cpu", enabled=True), torch.ones(3, 2)
    scaler.scale(model(x).float().sum() * float("inf")).backward()
    scaler.unscale_(optimizer)
    assert torch.equal(model.bias.grad, torch.zeros(2))
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(model(x).float().sum()).backward()
    scaler.unscale_(optimizer)
    assert torch.equal(model.bias.grad, torch.full((2,), 3.0))


@pytest.mark.parametrize(
    "level, optimizer_name",
    [("O0", "SGD"), ("O1", "AdamW"), *(("O2", name) for name in OPTIMIZERS), ("O4", "FusedAdam"), ("O5", "SGD")],
)
def test_the_loop_of_a_framework_trains_as_scale_loss(level, optimizer_name):
    spoiled = {2} if level in ("O1", "O2") else set()
    settings = {"loss_scale": RULE} if spoiled else {}
    by_scaler, expected = [], []
    for into in (by_scaler, expected):
        model, optimizer = initialize_quietly(net_with_norm(), OPTIMIZERS[optimizer_name], level, **settings)
        scaler = ampkit.GradScaler("cpu")
        for step in range(6):
            if into is by_scaler:
                frameworks_step(scaler, optimizer, loss_of(model, step, spoiled))
            else:
                iterate(lambda: loss_of(model, step, spoiled), optimizer)  # noqa: B023
            into.append((whole(model.state_dict()), ampkit.step_was_skipped(optimizer), ampkit.state_dict()))
        ampkit.close()
    for (weights, skipped, state), (wanted, wanted_skipped, wanted_state) in zip(by_scaler, expected, strict=True):
        assert_equal(weights, wanted)
        assert skipped == wanted_skipped and state == wanted_state
    assert [skipped for _, skipped, _ in by_scaler] == [step in spoiled for step in range(6)]


def test_a_framework_that_patches_step_sees_that_a_skipped_one_was_not_called():
    model, optimizer = initialize_quietly(net_with_norm(), OPTIMIZERS["AdamW"], "O2")
    scaler, plain, called = ampkit.GradScaler("cpu"), optimizer.step, []

    def step(*args, **kwargs):
        called.append(True)
        return plain(*args, **kwargs)

    optimizer.step = step
    before = whole(model.state_dict())
    frameworks_step(scaler, optimizer, loss_of(model, 0, {0}))
    assert not called and scaler.get_scale() == 2.0**15
    assert_equal(whole(model.state_dict()), before)
    frameworks_step(scaler, optimizer, loss_of(model, 1))
    assert called == [True] and scaler.get_scale() == 2.0**15


def test_one_of_two_optimizers_overflows_and_the_scale_moves_once():
    models, optimizers = initialize_quietly([net_with_norm(), net_with_norm(seed=1)], sgd, "O2", loss_scale=RULE)
    scaler, scales = ampkit.GradScaler("cpu"), []
    for step, spoiled in enumerate((None, 1, None, None, 0)):
        before = [whole(model.state_dict()) for model in models]
        for index, (model, optimizer) in enumerate(zip(models, optimizers)):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step, {step} if spoiled == index else ())).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        assert scaler.get_scale() == (scales or [256.0])[-1]  # it moves in update()
        scaler.update()
        scales.append(scaler.get_scale())
        for index, model in enumerate(models):
            moved = any(not torch.equal(value, before[index][name]) for name, value in model.state_dict().items())
            assert moved == (spoiled != index)
            assert ampkit.step_was_skipped(optimizers[index]) == (spoiled == index)
    # On paper: one clean, back to half, two clean and it doubles, half again.
    assert scales == [256.0, 128.0, 128.0, 256.0, 128.0]


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("level", ("O1", "O2"))
def test_unscaled_gradients_are_clipped_and_micro_batches_add_up(level, optimizer_name):
    twin = net_with_norm()
    for step in range(3):
        loss_of(twin, step).backward()
    expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    model, optimizer = initialize_quietly(net_with_norm(), OPTIMIZERS[optimizer_name], level)
    scaler = ampkit.GradScaler("cpu")
    for step in range(3):
        scaler.scale(loss_of(model, step)).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert norm.item() == pytest.approx(expected.item(), rel=0.02)
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert (param.grad.float() - other.grad).norm() <= 0.05 * 0.1  # of the norm of all, after clipping
    scaler.step(optimizer)
    scaler.update()
    assert not ampkit.step_was_skipped(optimizer)


def test_it_is_a_grad_scaler_and_its_state_is_torchs():
    initialize_quietly(net_with_norm(), OPTIMIZERS["SGD"], "O2", loss_scale=RULE)
    scaler, torchs = ampkit.GradScaler("cpu"), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)
    assert isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled()
    scaler.load_state_dict(torchs.state_dict())
    assert scaler.state_dict() == torchs.state_dict() and scaler.get_scale() == 1024.0
    assert ampkit.state_dict()["loss_scaler0"]["loss_scale"] == 1024.0
    scaler.set_growth_interval(1)
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.25)
    found = scaler.get_growth_interval(), scaler.get_growth_factor(), scaler.get_backoff_factor()
    assert found == (1, 4.0, 0.25)
    scaler.update(32.0)
    assert scaler.get_scale() == 32.0
    scaled = scaler.scale([torch.ones(2), torch.ones(())])
    assert [tensor.tolist() for tensor in scaled] == [[32.0, 32.0], 32.0]


def test_misuse_is_answered_as_torch_does():
    model, optimizer = initialize_quietly(net_with_norm(), OPTIMIZERS["SGD"], "O2")
    scaler = ampkit.GradScaler("cpu")
    scaler.scale(loss_of(model, 0)).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called on this optimizer"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="after step"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
        scaler.step(optimizer)
    scaler.update()
    with pytest.raises(RuntimeError, match="Closure"):
        scaler.step(optimizer, closure=lambda: None)
    with pytest.raises(ampkit.NotInitializedError, match="was not passed to initialize"):
        scaler.step(torch.optim.SGD(net_with_norm().parameters(), lr=0.1))
    ampkit.close()
    assert not scaler.is_enabled()
    with pytest.raises(ampkit.NotInitializedError, match="without a session"):
        scaler.scale(torch.ones(()))


@pytest.mark.parametrize("setting", [{"init_scale": 1024.0}, {"growth_interval": 100}, {"enabled": False}], ids=str)
def test_settings_of_torchs_grad_scaler_are_sent_to_initialize(setting):
    with pytest.raises(TypeError, match=rf"does not take {next(iter(setting))}=.*initialize\(\).*DynamicLossScale"):
        ampkit.GradScaler("cpu", **setting)


# A loss scale goes from torch.amp.GradScaler to ampkit and back, exactly

#: A session ends with its models, at whatever garbage collection.
ALIVE = []


def at_o1(**settings):
    ALIVE[:] = initialize_quietly(nn.Linear(2, 2), sgd, "O1", **settings)
    return ALIVE


STATE = {"scale": 3.0 * 2**7, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 7, "_growth_tracker": 5}


@pytest.mark.parametrize("scale", [3.0 * 2**7, 2.0**-20], ids=["384", "below the floor"])
def test_a_state_goes_there_and_back(scale):
    scaler, again = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")
    scaler.load_state_dict({**STATE, "scale": scale})
    at_o1()
    ampkit.from_grad_scaler(scaler.state_dict())
    assert ampkit.state_dict()["loss_scaler0"] == {"loss_scale": scale, "unskipped": 5}
    assert ampkit.to_grad_scaler() == {**STATE, "scale": scale}
    again.load_state_dict(ampkit.to_grad_scaler())
    assert again.state_dict() == scaler.state_dict()


def test_it_moves_on_as_the_grad_scaler_did():
    model, optimizer = at_o1()
    ampkit.from_grad_scaler(STATE)
    states = []
    for factor in (1.0, 1.0, math.inf):
        iterate(lambda factor=factor: model(torch.ones(1, 2)).float().sum() * factor, optimizer)
        states.append((ampkit.to_grad_scaler()["scale"], ampkit.to_grad_scaler()["_growth_tracker"]))
    assert states == [(384.0, 6), (1152.0, 0), (288.0, 0)]  # the second is the seventh clean one


def test_one_of_several_losses():
    at_o1(num_losses=2)
    ampkit.from_grad_scaler(STATE, loss_id=1)
    assert [entry["loss_scale"] for entry in ampkit.state_dict().values()] == [65536.0, 384.0]
    assert ampkit.to_grad_scaler(1) == STATE and ampkit.to_grad_scaler(0)["scale"] == 65536.0


def test_a_static_scale_does_not_grow_in_a_grad_scaler():
    at_o1(loss_scale=128.0)
    state = ampkit.to_grad_scaler()
    assert state["scale"] == 128.0 and state["growth_interval"] > 10**9
    torch.amp.GradScaler("cpu").load_state_dict(state)


@pytest.mark.parametrize(
    "state, words",
    [
        ({}, None),  # of a GradScaler that is off
        *(({"scale": 2.0}, "scale"), ({**STATE, "scale": 0.0}, "scale"), ({**STATE, "scale": math.inf}, "scale")),
        ({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 0}}, r"must have 'scale', .* found 'loss_scaler0'"),
    ],
)
def test_states_that_cannot_be_are_refused_and_an_empty_one_changes_nothing_either(state, words):
    at_o1()
    with nullcontext() if words is None else pytest.raises(ampkit.CheckpointError, match=words):
        ampkit.from_grad_scaler(state)
    assert ampkit.to_grad_scaler()["scale"] == 65536.0 and ampkit.to_grad_scaler()["growth_interval"] == 2000


def test_a_session_that_is_not_enabled_leaves_a_disabled_grad_scaler():
    """Twice the step on paper: 1 - 0.5 * 3 at a gradient of 3."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ampkit.initialize(model, optimizer, opt_level="O1", enabled=False, verbosity=0)
    scaler = ampkit.GradScaler("cpu", enabled=False)
    ampkit.from_grad_scaler(STATE)
    scaler.load_state_dict(STATE)
    for weight in (-0.5, -2.0):
        frameworks_step(scaler, optimizer, model(torch.full((1, 1), 3.0)).sum())
        assert model.weight.item() == weight
    assert scaler.state_dict() == ampkit.to_grad_scaler() == {} and scaler.get_scale() == 1.0


def test_a_static_scale_says_that_it_does_not_take_a_saved_one(caplog):
    at_o1(loss_scale=128.0)
    ampkit.from_grad_scaler(STATE)
    assert "384 is not loaded" in caplog.text and "stays 128" in caplog.text and "loss_scale='dynamic'" in caplog.text
    assert ampkit.to_grad_scaler()["scale"] == 128.0


def test_the_state_of_a_grad_scaler_is_named_where_it_is_loaded_as_ampkits():
    at_o1()
    with pytest.raises(ampkit.CheckpointError, match=r"ampkit\.from_grad_scaler\(state\)"):
        ampkit.load_state_dict(STATE)


def test_without_a_session_there_is_no_loss_scale():
    with pytest.raises(ampkit.NotInitializedError):
        ampkit.to_grad_scaler()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
        lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    ],
    ids=["SGD fused", "Adam fused", "SGD"],
)
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_torchs_grad_scaler_left_in_the_script_unscales_for_every_optimizer(make, level):
    """torch's scaler hands its scale to fused optimizers, which unscale in the step."""

    def weights(level, steps=10):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
        optimizer = make(model.parameters())
        if level is not None:
            ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for x in torch.randn(10, 16, 8, generator=torch.Generator().manual_seed(1))[:steps]:
            frameworks_step(scaler, optimizer, (model(x).float() - x.sum(1, keepdim=True)).square().mean())
        return torch.cat([value.double().flatten() for value in model.state_dict().values()])

    start, exact, found = weights(None, steps=0), weights(None), weights(level)
    assert (found - exact).norm() < 0.02 * (exact - start).norm()
