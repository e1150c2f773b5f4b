"""`LostUpdates`: the shares of `check_updates` by samples, in a plain loop and by the calls of frameworks."""

import contextlib
import logging
from types import SimpleNamespace

import pytest
import torch
from helpers import backward, python
from torch import nn

import ampkit
from ampkit.integrations import lost_updates
from ampkit.integrations.lost_updates import LostUpdates


def model_and_optimizer(dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 1)).to(dtype)
    return model, torch.optim.AdamW(model.named_parameters(), lr=1e-4, weight_decay=0.0)


def train(model, optimizer, steps=8):
    dtype = next(model.parameters()).dtype
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8).to(dtype)).float().square().mean().backward()
        optimizer.step()


@pytest.fixture
def all_in_time(monkeypatch):
    """Set a budget in which every parameter is checked in every step, however fast steps are."""
    monkeypatch.setattr(lost_updates, "BUDGET", 1e9)
    monkeypatch.setattr(lost_updates, "FIRST", 99)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shares_are_those_of_check_updates(dtype, all_in_time):
    model, optimizer = model_and_optimizer(dtype)
    check = ampkit.check_updates(optimizer, every=1)
    with LostUpdates(optimizer) as lost:
        train(model, optimizer)
    assert lost.shares == check.shares and len(lost.shares) == 6
    sizes = {name: param.numel() for name, param in model.named_parameters()}
    whole = sum(share * sizes[name] for name, share in check.shares.items()) / sum(sizes.values())
    assert lost.share == pytest.approx(whole) and (lost.share > 0.3) == (dtype is torch.bfloat16)


def test_a_loop_is_warned_once_and_logged_after_five_steps_and_at_every_nth(all_in_time, caplog):
    model, optimizer = model_and_optimizer()
    logged = []
    with caplog.at_level(logging.WARNING, "ampkit"), LostUpdates(optimizer, log=logged.append, every=10):
        train(model, optimizer, steps=25)
    assert len(logged) == 4  # after 5, 10, 20, and at the end
    assert all(set(values) == {"ampkit/lost_updates", "ampkit/lost_updates_worst"} for values in logged)
    assert logged[-1]["ampkit/lost_updates_worst"] == 1.0
    (line,) = [record.getMessage() for record in caplog.records if "were lost" in record.getMessage()]
    assert "'1.weight' (bfloat16, lr 0.0001)" in line and 'opt_level="O5"' in line
    train(model, optimizer, steps=10)
    assert len(logged) == 4


@pytest.mark.parametrize(
    "seconds, counts",
    [(100.0, [1, 2, 2, 2, 2, 2, 2]), (25.0, [1, 0, 1, 0, 1, 0, 1])],
    ids=["two of six in turn", "one in every second step"],
)
def test_a_step_looks_at_as_many_parameters_as_the_budget_allows(seconds, counts, monkeypatch):
    """Each check costs a second, and a step takes some: a budget of 2%."""
    looked_at, times, original = [], {"now": 0.0}, lost_updates.Weights

    def weights(optimizer, most, named):
        looked_at[-1] += [name for name, _, _ in named]
        times["now"] += len(named)
        return original(optimizer, most, named)

    monkeypatch.setattr(lost_updates, "perf_counter", lambda: times["now"])
    monkeypatch.setattr(lost_updates, "Weights", weights)
    model, optimizer = model_and_optimizer(torch.float32)
    with LostUpdates(optimizer) as lost:
        for _ in counts:
            before = times["now"]
            looked_at.append([])
            train(model, optimizer, steps=1)
            times["now"] = before + seconds
    assert [len(names) for names in looked_at] == counts
    assert set(lost.shares) == {name for names in looked_at for name in names}
    assert seconds == 25.0 or len(lost.shares) == 6


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("level", ["O2", "O5", "torch's GradScaler"])
def test_float32_values_lose_nothing_nor_do_skipped_steps(level, fused, all_in_time):
    model, _ = model_and_optimizer(torch.float32)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused), None
    if level in ("O2", "O5"):
        ampkit.initialize(model, optimizer, opt_level=level, loss_scale=1024.0, verbosity=0)
    else:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with LostUpdates(optimizer) as lost:
        for factor in 1.0, float("inf"), 1.0:
            optimizer.zero_grad()
            loss = (model(torch.randn(4, 8)).float() * torch.tensor([[factor], [1.0], [1.0], [1.0]])).square().mean()
            if scaler is None:
                backward(loss, optimizer)
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    assert lost.share < 0.02


def by_trainer(callback, model, optimizer, logged):
    """Call the callback as transformers' CallbackHandler does: every event, by name."""

    def call(event, **kwargs):
        getattr(callback, event)("args", "state", "control", model=model, optimizer=optimizer, **kwargs)

    for event in ("on_init_end", "on_train_begin", "on_epoch_begin"):
        call(event)
    for _ in range(8):
        call("on_step_begin")
        train(model, optimizer, steps=1)
        call("on_step_end")
    call("on_log", logs={})
    call("on_train_end")


def by_lightning(callback, model, optimizer, logged):
    writer = SimpleNamespace(log_metrics=lambda values, step: logged.append(values))
    trainer = SimpleNamespace(optimizers=[optimizer], loggers=[writer], global_step=3)
    callback.on_train_start(trainer, model)
    train(model, optimizer)
    callback.on_train_end(trainer, model)


@pytest.mark.parametrize("drive", [by_trainer, by_lightning])
def test_the_calls_of_a_framework_begin_and_end_it(drive, all_in_time):
    model, optimizer = model_and_optimizer()
    logged = []
    callback = LostUpdates(log=logged.append)
    drive(callback, model, optimizer, logged)
    assert len(logged) == 2 and logged[-1]["ampkit/lost_updates_worst"] == 1.0
    train(model, optimizer)
    assert len(logged) == 2


def test_where_a_framework_is_imported_it_is_one_of_its_callbacks():
    script = (
        "import sys, types; framework = types.ModuleType('transformers');"
        "framework.TrainerCallback = type('TrainerCallback', (), {});"
        "sys.modules['transformers'] = framework; from ampkit.integrations.lost_updates import LostUpdates;"
        "print(isinstance(LostUpdates(), framework.TrainerCallback))"
    )
    assert python("-c", script).stdout == "True\n"


def test_bad_arguments_are_refused():
    for settings in {"every": 0}, {"share": 2.0}:
        with pytest.raises(ValueError, match="expected at least 1, and from 0 to 1"):
            LostUpdates(**settings)
    with pytest.raises(TypeError), contextlib.suppress(KeyError):
        LostUpdates(nn.Linear(2, 2))
