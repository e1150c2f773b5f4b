"""The `NativeScaler` for timm's loop, judged by a loop with `scale_loss` and, for clipping, by timm's own in float32."""

import math

import pytest
import torch
from helpers import backward, initialize_quietly, net_with_norm, random_batch, saved_and_loaded
from torch.nn import functional as F

import ampkit
from ampkit.integrations.timm import NativeScaler

timm_utils = pytest.importorskip("timm.utils", reason="`make clients` installs timm")

RULE = ampkit.DynamicLossScale(init_scale=256.0, growth_interval=3)


def make_optimizer(params):
    return torch.optim.AdamW(params, lr=0.01)


def settings_of(level):
    """O2 in float16, which the CPU's default is not."""
    settings = {"O1": {"loss_scale": RULE}, "O2": {"loss_scale": RULE, "cast_model_type": torch.float16}}
    return settings.get(level, {})


def loss_of(model, step, spoiled=None):
    x, y = random_batch(seed=step)
    return F.mse_loss(model(x).float(), y) * (math.inf if step == spoiled else 1.0)


def timms_step(scaler, model, optimizer, step, spoiled=None, **settings):
    optimizer.zero_grad()
    scaler(loss_of(model, step, spoiled), optimizer, parameters=model.parameters(), **settings)


def weights_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("level", ("O1", "O2", "O5"))
def test_a_call_is_backward_clipping_and_step(level):
    spoiled = 2 if level != "O5" else None
    found, expected = [], []
    for into in (found, expected):
        model, optimizer = initialize_quietly(net_with_norm(), make_optimizer, level, **settings_of(level))
        scaler = NativeScaler()
        for step in range(6):
            if into is found:
                timms_step(scaler, model, optimizer, step, spoiled, clip_grad=0.1)
            else:
                optimizer.zero_grad()
                backward(loss_of(model, step, spoiled), optimizer)
                ampkit.clip_grad_norm_(optimizer, 0.1)
                optimizer.step()
            into.append((weights_of(model), ampkit.step_was_skipped(optimizer), ampkit.state_dict()))
        ampkit.close()
    for (weights, *state), (wanted, *wanted_state) in zip(found, expected, strict=True):
        assert_equal(weights, wanted)
        assert state == wanted_state
    assert [skipped for _, skipped, _ in found] == [step == spoiled for step in range(6)]
    if spoiled is not None:  # half of it once, and growth after three clean ones
        assert [state["loss_scaler0"]["loss_scale"] for *_, state in found] == [256, 256, 128, 128, 128, 256]


def test_micro_batches_add_up_in_float32():
    model, optimizer = initialize_quietly(net_with_norm(), make_optimizer, "O2", **settings_of("O2"))
    twin, scaler = net_with_norm(), NativeScaler()
    before = weights_of(model)
    for step in range(3):
        loss_of(twin, step).backward()
        scaler(loss_of(model, step), optimizer, need_update=step == 2)
        if step < 2:
            assert_equal(weights_of(model), before)
    for master, param in zip(ampkit.master_params(optimizer), twin.parameters(), strict=True):
        assert (master.grad - param.grad).abs().max() <= 0.01


@pytest.mark.parametrize("mode", ("norm", "value", "agc"))
@pytest.mark.parametrize("level", ("O0", "O1", "O2"))
def test_what_is_clipped_is_what_timm_clips_in_float32(level, mode):
    """All parameters but the last layer's, as timm's ``exclude_head`` chooses; a step of SGD at lr 1 is the gradient."""
    twin = net_with_norm()
    loss_of(twin, 0).backward()
    unclipped = [param.grad.clone() for param in twin.parameters()]
    timm_utils.dispatch_clip_grad(list(twin.parameters())[:-2], 0.01, mode=mode)
    model, optimizer = initialize_quietly(
        net_with_norm(), lambda params: torch.optim.SGD(params, lr=1.0), level, **settings_of(level)
    )
    chosen = list(model.parameters())[:-2]
    NativeScaler()(loss_of(model, 0), optimizer, clip_grad=0.01, clip_mode=mode, parameters=chosen)
    after = ampkit.master_params(optimizer)
    for master, before, param, plain in zip(after, net_with_norm().parameters(), twin.parameters(), unclipped):
        # Where elements are clamped, others are as inexact as they were before.
        largest = (param.grad if mode == "norm" else plain).abs().max()
        assert (before - master - param.grad).abs().max() <= (1e-6 if level == "O0" else 0.02 * largest)


@pytest.mark.parametrize("level", ("O1", "O2", "O5"))
def test_a_resumed_run_goes_on_bit_for_bit(level):
    model, optimizer = initialize_quietly(net_with_norm(), make_optimizer, level, **settings_of(level))
    scaler, spoiled = NativeScaler(), 1 if level != "O5" else None
    for step in range(4):
        timms_step(scaler, model, optimizer, step, spoiled)
    saved = saved_and_loaded([model.state_dict(), optimizer.state_dict(), {scaler.state_dict_key: scaler.state_dict()}])
    again, optimizer_again = initialize_quietly(net_with_norm(seed=9), make_optimizer, level, **settings_of(level))
    again.load_state_dict(saved[0])
    optimizer_again.load_state_dict(saved[1])
    scaler.load_state_dict(saved[2]["amp_scaler"])
    assert set(saved[2]["amp_scaler"]) == set(torch.amp.GradScaler("cpu").state_dict())
    timms_step(scaler, again, optimizer_again, 4, spoiled)
    resumed = weights_of(again), scaler.state_dict()
    model, optimizer = initialize_quietly(net_with_norm(), make_optimizer, level, **settings_of(level))
    for step in range(5):
        timms_step(scaler, model, optimizer, step, spoiled)
    assert_equal(resumed[0], weights_of(model))
    assert resumed[1] == scaler.state_dict()
