"""A loss scale goes from torch.amp.GradScaler to ampkit and back, exactly."""

import pytest
import torch
from helpers import initialize_quietly, iterate
from torch import nn

import ampkit

#: A session ends with its models, at whatever garbage collection.
ALIVE = []


def at_o1(**settings):
    ALIVE[:] = initialize_quietly(nn.Linear(2, 2), lambda p: torch.optim.SGD(p, lr=0.1), "O1", **settings)
    return ALIVE


def grad_scaler(**settings):
    return torch.amp.GradScaler("cpu", **settings)


STATE = {"scale": 3.0 * 2**7, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 7, "_growth_tracker": 5}


def test_there_and_back():
    scaler = grad_scaler()
    scaler.load_state_dict(STATE)
    at_o1()
    ampkit.from_grad_scaler(scaler.state_dict())
    assert ampkit.state_dict()["loss_scaler0"] == {"loss_scale": 384.0, "unskipped": 5}
    assert ampkit.to_grad_scaler() == STATE
    again = grad_scaler()
    again.load_state_dict(ampkit.to_grad_scaler())
    assert again.state_dict() == scaler.state_dict()


def test_it_moves_on_as_the_grad_scaler_did():
    model, optimizer = at_o1()
    ampkit.from_grad_scaler(STATE)

    def step(factor=1.0):
        iterate(lambda: model(torch.ones(1, 2)).float().sum() * factor, optimizer)
        return ampkit.to_grad_scaler()["scale"], ampkit.to_grad_scaler()["_growth_tracker"]

    assert step() == (384.0, 6)
    assert step() == (1152.0, 0)  # the seventh clean one
    assert step(float("inf")) == (288.0, 0)


def test_a_scale_below_the_floor_is_taken_exactly():
    at_o1()
    ampkit.from_grad_scaler({**STATE, "scale": 2.0**-20})
    assert ampkit.to_grad_scaler()["scale"] == 2.0**-20


def test_one_of_several_losses():
    at_o1(num_losses=2)
    ampkit.from_grad_scaler(STATE, loss_id=1)
    assert [entry["loss_scale"] for entry in ampkit.state_dict().values()] == [65536.0, 384.0]
    assert ampkit.to_grad_scaler(1) == STATE and ampkit.to_grad_scaler(0)["scale"] == 65536.0


def test_a_static_scale_does_not_grow_in_a_grad_scaler():
    at_o1(loss_scale=128.0)
    state = ampkit.to_grad_scaler()
    assert state["scale"] == 128.0 and state["growth_interval"] > 10**9
    grad_scaler().load_state_dict(state)


def test_the_empty_state_of_a_disabled_grad_scaler_changes_nothing():
    at_o1()
    ampkit.from_grad_scaler(grad_scaler(enabled=False).state_dict())
    assert ampkit.to_grad_scaler()["scale"] == 65536.0


@pytest.mark.parametrize("state", [{"scale": 2.0}, {**STATE, "scale": 0.0}, {**STATE, "scale": float("inf")}])
def test_states_that_cannot_be_are_refused_and_change_nothing(state):
    at_o1()
    with pytest.raises(ampkit.CheckpointError):
        ampkit.from_grad_scaler(state)
    assert ampkit.to_grad_scaler()["scale"] == 65536.0 and ampkit.to_grad_scaler()["growth_interval"] == 2000


def test_the_state_of_ampkit_given_as_a_grad_scalers_is_told_by_its_keys():
    at_o1()
    with pytest.raises(ampkit.CheckpointError, match=r"must have 'scale', .* found 'loss_scaler0'"):
        ampkit.from_grad_scaler(ampkit.state_dict())


def test_without_a_session_there_is_no_loss_scale():
    with pytest.raises(ampkit.NotInitializedError):
        ampkit.to_grad_scaler()


@pytest.mark.parametrize(
    "level, make",
    (
        ("O1", lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True)),
        ("O2", lambda p: torch.optim.Adam(p, lr=0.01, fused=True)),
        ("O2", lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True)),
        ("O5", lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)),
        ("O4", lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)),
    ),
    ids=("SGD fused", "Adam fused", "SGD fused over rests", "AdamW fused", "SGD"),
)
def test_torchs_grad_scaler_left_in_the_script_unscales_for_every_optimizer(make, level):
    """torch's scaler hands its scale to fused optimizers, which unscale in the step."""

    def weights(level):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
        optimizer = make(model.parameters())
        if level is not None:
            ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
        scaler = grad_scaler(init_scale=1024.0)
        for x in torch.randn(10, 16, 8, generator=torch.Generator().manual_seed(1)):
            optimizer.zero_grad()
            scaler.scale((model(x).float() - x.sum(1, keepdim=True)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        return torch.cat([value.double().flatten() for value in model.state_dict().values()])

    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    exact, found = weights(None), weights(level)
    moved = (exact - torch.cat([param.detach().double().flatten() for param in start.parameters()])).norm()
    assert (found - exact).norm() < 0.02 * moved
