"""Checks of gradients: a step with a non-finite gradient changes nothing, at every level, and is reported."""

import math

import pytest
import torch
from helpers import STORED_BF16, assert_skips, backward, everything, initialize_quietly, iterate, random_batch
from torch import nn
from torch.nn import functional as F

import ampkit
from ampkit import optimizers
from ampkit.apex import optimizers as apex_optimizers

OURS = {
    "FusedAdam": lambda p: optimizers.FusedAdam(p, lr=1e-2),
    "FusedAdam, int8": lambda p: optimizers.FusedAdam(p, lr=1e-2, state_dtype="int8"),
    "FusedSGD": lambda p: optimizers.FusedSGD(p, lr=0.05, momentum=0.9),
    "FusedLAMB": lambda p: apex_optimizers.FusedLAMB(p, lr=1e-2),
    "FusedNovoGrad": lambda p: apex_optimizers.FusedNovoGrad(p, lr=1e-2),
    "FusedAdagrad": lambda p: apex_optimizers.FusedAdagrad(p, lr=1e-2),
    "FusedLARS": lambda p: apex_optimizers.FusedLARS(p, lr=0.05, momentum=0.9),
}
TORCHS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}
# Their gradients are checked where that is asked for.
UNCHECKED = {"RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3)}
MAKERS = {**OURS, **TORCHS, **UNCHECKED}
ON_REQUEST = [("O0", "AdamW"), *((level, "RMSprop") for level in ("O0", "O2", "O4", "O5"))]
CASES = [
    *ON_REQUEST,
    *[(level, "FusedAdam") for level in ("O0", "O1", "O3", "O4")],
    *[("O4", name) for name in ("SGD", "AdamW")],
    *[(level, make) for level in ("O2", "O5") for make in (*OURS, *TORCHS)],
]
SKIPPED = "this step is skipped"


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batch(seed=1):
    return random_batch(seed, rows=8)


def iteration(model, optimizer, bad=1.0, seed=1, clip=None):
    x, y = batch(seed)
    optimizer.zero_grad()
    loss = F.mse_loss(model(x * bad if math.isnan(bad) else x).float(), y)
    backward(loss if math.isnan(bad) else loss * bad, optimizer)
    if clip is not None:
        ampkit.clip_grad_norm_(optimizer, clip)
    optimizer.step()


@pytest.mark.parametrize(("level", "name", "clip"), [(*case, (None, 1.0)[i % 2]) for i, case in enumerate(CASES)])
def test_a_bad_batch_leaves_no_trace_and_is_told(level, name, clip, caplog):
    settings = {"check_gradients": True} if (level, name) in ON_REQUEST else {}
    model, optimizer = initialize_quietly(net(), MAKERS[name], level, loss_scale=1.0, **settings)
    for seed in range(2):
        iteration(model, optimizer, seed=seed, clip=clip)
    before = everything(model, optimizer)
    with caplog.at_level("INFO", logger="ampkit"):
        for bad in (math.nan, math.inf):
            assert_skips(model, optimizer, lambda bad=bad: iteration(model, optimizer, bad, clip=clip))
            assert all(buffer.isfinite().all() for buffer in model.buffers())
        iteration(model, optimizer, clip=clip)
    assert not ampkit.step_was_skipped(optimizer)
    assert caplog.text.count(SKIPPED) == 2
    after = everything(model, optimizer)
    assert all(value.float().isfinite().all() for value in after)
    assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_it_can_be_switched_off():
    model, optimizer = initialize_quietly(net(), OURS["FusedAdam"], "O5", check_gradients=False)
    iteration(model, optimizer, math.nan)
    assert not any(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("level", "name", "settings", "told"),
    [
        ("O4", "RMSprop", {}, True),
        ("O5", "RMSprop", {}, True),
        ("O5", "AdamW", {}, False),
        ("O5", "AdamW", {"one_pass_step": False}, True),
        ("O5", "RMSprop", {"check_gradients": False}, False),
        ("O5", "RMSprop", {"check_gradients": True}, False),
        ("O5", "RMSprop", {"loss_scale": "dynamic"}, False),
        ("O0", "RMSprop", {}, False),
        ("O2", "RMSprop", {}, False),
    ],
)
def test_initialize_says_whose_gradients_nothing_checks(level, name, settings, told, capsys):
    model = net()
    ampkit.initialize(model, MAKERS[name](model.parameters()), opt_level=level, **settings)
    assert ("Nothing checks the gradients of" in capsys.readouterr().out) is told


@pytest.mark.parametrize(
    "level, name",
    [
        *((level, "the loss is nan") for level in ("O1", "O2")),
        *(("O2", "0.weight"), (STORED_BF16, "1.bias"), ("O5", "3.bias"), ("O1", "3.bias")),
    ],
)
def test_of_what_is_bad_for_long_the_first_name_is_told_and_of_a_bad_loss_no_parameters(level, name, caplog):
    """At a loss scale the next iteration tells, when it has cleared the gradients."""
    model, optimizer = initialize_quietly(net(), OURS["FusedAdam"], level)
    params = dict(model.named_parameters())
    if name in params:
        for other in list(params)[list(params).index(name) :]:  # this one and those behind it
            params[other].register_hook(lambda gradient: gradient * math.nan)
    with caplog.at_level("WARNING", logger="ampkit"):
        for _ in range(26):
            assert level not in ("O1", "O2") or "25 steps in a row" not in caplog.text
            iteration(model, optimizer, 1.0 if name in params else math.nan)
    told = f"the gradient of {name!r}" if name in params else name
    assert f"25 steps in a row were skipped (iteration 25: {told})" in caplog.text
    assert (name in params) is ("the gradient of" in caplog.text)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("level", ["O2", STORED_BF16, "O4", "O5"])
def test_gradients_that_come_after_a_clipping_are_looked_at(level, clips):
    """Check a second step, and a second backward pass."""
    settings = {"loss_scale": 128.0} if level == "O2" else {}
    model, optimizer = initialize_quietly(net(), OURS["FusedAdam"], level, **settings)
    x, y = batch()
    backward(F.mse_loss(model(x).float(), y), optimizer)
    if clips:
        ampkit.clip_grad_norm_(optimizer, 1.0)
    optimizer.step()
    for p in model.parameters():
        p.grad = torch.full_like(p, math.nan)
    optimizer.step()
    assert ampkit.step_was_skipped(optimizer)
    if level == "O4":
        optimizer.zero_grad()
        F.mse_loss(model(x).float(), y).backward()
        if clips:
            ampkit.clip_grad_norm_(optimizer, 1.0)
        (F.mse_loss(model(x).float(), y) * math.nan).backward()
        optimizer.step()
        assert ampkit.step_was_skipped(optimizer)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ["FusedAdam", "AdamW"])
@pytest.mark.parametrize("level", [STORED_BF16, "O5"])
def test_a_clip_that_has_measured_inf_skips_the_step(name, level):
    """A clip may measure inf without any NaN; a loss that is inf leaves NaN beside it."""
    model, optimizer = initialize_quietly(net(), MAKERS[name], level)
    iteration(model, optimizer)
    x, y = batch()
    model[3].bias.register_hook(lambda gradient: torch.full_like(gradient, math.inf))
    optimizer.zero_grad()
    backward(F.mse_loss(model(x), y), optimizer)
    assert ampkit.clip_grad_norm_(optimizer, 1.0).item() == math.inf
    assert_skips(model, optimizer)


@pytest.mark.parametrize("one_pass_step", [True, False])
def test_a_grad_scaler_counts_each_iteration_once(one_pass_step):
    settings = {"loss_scale": 128.0, "one_pass_step": one_pass_step}
    models, both = initialize_quietly([nn.Linear(6, 3), nn.Linear(6, 3)], torch.optim.Adam, "O2", **settings)
    scaler, (x, _) = ampkit.GradScaler(), batch()
    with pytest.raises(ampkit.LossScaleError, match="50 steps in a row"):
        for _ in range(60):
            for optimizer in both:
                optimizer.zero_grad()
            scaler.scale(models[0](x).sum() * math.inf + models[1](x).sum()).backward()
            for optimizer in reversed(both):
                scaler.step(optimizer)
            scaler.update()


@pytest.mark.parametrize("make", [torch.optim.AdamW, optimizers.FusedAdam])
def test_each_loss_counts_its_own_skips(make):
    """A GAN at loss scale 1: one half learns, the other does not."""
    models, both = initialize_quietly([nn.Linear(6, 3), nn.Linear(6, 3)], make, "O5", num_losses=2)
    x, _ = batch()
    with pytest.raises(ampkit.LossScaleError, match=r"50 steps in a row.*static loss scale 1"):
        for _ in range(51):
            iterate(lambda: models[0](x).sum() * math.nan, both[0])
            iterate(lambda: models[1](x).sum(), both[1], loss_id=1)


@pytest.mark.parametrize(
    "level, name",
    [
        *((STORED_BF16, "AdamW"), ("O5", "AdamW"), ("O5", "AdamW, fused"), (STORED_BF16, "FusedAdam")),
        *(("O0", "FusedAdam"), ("O4", "AdamW"), ("O4", "SGD")),
    ],
)
def test_skips_without_blocks_are_told_and_end_the_training(name, level, caplog):
    """The script clears gradients by hand, and steps that are taken alternate with others."""
    model, optimizer = initialize_quietly(net(), MAKERS[name], level)
    x, y = batch()

    def step(factor):
        for p in model.parameters():
            p.grad = None
        (F.mse_loss(model(x), y) * factor).backward()
        optimizer.step()

    with caplog.at_level("INFO", logger="ampkit"):
        for index in range(20):
            step(math.nan if index % 5 == 4 else 1.0)
    assert caplog.text.count(SKIPPED) == 4
    with pytest.raises(ampkit.LossScaleError, match="50 steps in a row"):
        for _ in range(51):
            step(math.nan)
