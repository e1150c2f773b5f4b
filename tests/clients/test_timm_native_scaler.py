"""The `NativeScaler` for timm's loop, judged by a loop with `scale_loss` and, for clipping, by timm's own in float32."""

import pytest
import torch
from by_hand import (
    OPTIMIZERS,
    STEPS,
    assert_equal,
    assert_same_steps,
    loss_of,
    settings_of,
    spoiled_at,
    trained_by_hand,
    values,
)
from helpers import initialize_quietly, net_with_norm, saved_and_loaded

import ampkit
from ampkit.integrations.timm import NativeScaler

timm_utils = pytest.importorskip("timm.utils", reason="`make clients` installs timm")


def prepared(level, make_optimizer=OPTIMIZERS["AdamW"], **model):
    settings = settings_of(level)
    return initialize_quietly(net_with_norm(**model), make_optimizer, settings.pop("opt_level"), **settings)


def timms_step(scaler, model, optimizer, step, spoiled=None, **settings):
    optimizer.zero_grad()
    scaler(loss_of(model, step, spoiled), optimizer, parameters=model.parameters(), **settings)


@pytest.mark.parametrize("level", ("O1", "O2", "O5"))
def test_a_call_is_backward_clipping_and_step(level):
    spoiled, results = spoiled_at(level, 2), []
    expected = trained_by_hand(level, spoiled=spoiled, clip=0.1)
    (model, optimizer), scaler = prepared(level), NativeScaler()
    for step in range(STEPS):
        timms_step(scaler, model, optimizer, step, spoiled, clip_grad=0.1)
        results.append((values(model), ampkit.step_was_skipped(optimizer), ampkit.state_dict()))
    assert_same_steps(results, expected)
    assert [skipped for _, skipped, _ in results] == [step == spoiled for step in range(STEPS)]
    if spoiled is not None:  # half of it once, and growth after three clean ones
        assert [state["loss_scaler0"]["loss_scale"] for *_, state in results] == [256, 256, 128, 128, 128, 256]


def test_micro_batches_add_up_in_float32():
    model, optimizer = prepared("O2")
    twin, scaler = net_with_norm(), NativeScaler()
    before = values(model)
    for step in range(3):
        loss_of(twin, step).backward()
        scaler(loss_of(model, step), optimizer, need_update=step == 2)
        if step < 2:
            assert_equal(values(model), before)
    for master, param in zip(ampkit.master_params(optimizer), twin.parameters(), strict=True):
        assert (master.grad - param.grad).abs().max() <= 0.01


@pytest.mark.parametrize("mode", ("norm", "value", "agc"))
@pytest.mark.parametrize("level", ("O0", "O1", "O2"))
def test_what_is_clipped_is_what_timm_clips_in_float32(level, mode):
    """Clip all parameters but the last layer's, as timm's ``exclude_head`` chooses; a step of SGD at lr 1 is the gradient."""
    twin = net_with_norm()
    loss_of(twin, 0).backward()
    unclipped = [param.grad.clone() for param in twin.parameters()]
    timm_utils.dispatch_clip_grad(list(twin.parameters())[:-2], 0.01, mode=mode)
    model, optimizer = prepared(level, lambda params: torch.optim.SGD(params, lr=1.0))
    chosen = list(model.parameters())[:-2]
    NativeScaler()(loss_of(model, 0), optimizer, clip_grad=0.01, clip_mode=mode, parameters=chosen)
    after = ampkit.master_params(optimizer)
    for master, before, param, plain in zip(after, net_with_norm().parameters(), twin.parameters(), unclipped):
        # Where elements are clamped, all others are as inexact as before.
        largest = (param.grad if mode == "norm" else plain).abs().max()
        assert (before - master - param.grad).abs().max() <= (1e-6 if level == "O0" else 0.02 * largest)


@pytest.mark.parametrize("level", ("O1", "O2", "O5"))
def test_a_resumed_run_goes_on_bit_for_bit(level):
    model, optimizer = prepared(level)
    scaler, spoiled = NativeScaler(), spoiled_at(level, 1)
    for step in range(4):
        timms_step(scaler, model, optimizer, step, spoiled)
    saved = saved_and_loaded([model.state_dict(), optimizer.state_dict(), {scaler.state_dict_key: scaler.state_dict()}])
    again, optimizer_again = prepared(level, seed=9)
    again.load_state_dict(saved[0])
    optimizer_again.load_state_dict(saved[1])
    scaler.load_state_dict(saved[2]["amp_scaler"])
    assert set(saved[2]["amp_scaler"]) == set(torch.amp.GradScaler("cpu").state_dict())
    timms_step(scaler, again, optimizer_again, 4, spoiled)
    resumed = values(again), scaler.state_dict()
    model, optimizer = prepared(level)
    for step in range(5):
        timms_step(scaler, model, optimizer, step, spoiled)
    assert_equal(resumed[0], values(model))
    assert resumed[1] == scaler.state_dict()
