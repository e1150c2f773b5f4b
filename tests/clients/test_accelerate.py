"""Accelerate's own loop over a session, judged by the same loop written by hand, and by float32."""

import pytest
import torch
from by_hand import (
    OPTIMIZERS,
    assert_clipped_as_in_float32,
    assert_equal,
    assert_same_steps,
    loss_of,
    settings_of,
    spoiled_at,
    trained_by_hand,
    values,
)
from helpers import net_with_norm

import ampkit
from ampkit.integrations.accelerate import attach

accelerate = pytest.importorskip("accelerate", reason="`make clients` installs accelerate")

ORDERS = ("prepare, initialize", "initialize, prepare", "initialize, attach, prepare")


def accelerator(**settings):
    """Make an accelerator without the settings of another one, which live in classes."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    return accelerate.Accelerator(cpu=True, **settings)


def prepared(instance, level, order=ORDERS[0], optimizer="AdamW", seed=0, born_in=torch.float32):
    model = net_with_norm(seed=seed).to(born_in)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    for deed in order.split(", "):
        if deed == "prepare":
            model, optimizer = instance.prepare(model, optimizer)
        elif deed == "attach":
            attach(instance)
        else:
            model, optimizer = ampkit.initialize(model, optimizer, **settings_of(level))
    if "attach" not in order:
        attach(instance)
    return model, optimizer


def trained(instance, model, optimizer, steps, spoiled=None, clip=None):
    """Train as `accelerate`'s pages write; of each step (weights, whether it was skipped, state of the loss scale)."""
    results = []
    for step in steps:
        with instance.accumulate(model):
            instance.backward(loss_of(model, step, spoiled))
            if clip is not None and instance.sync_gradients:
                instance.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        results.append((values(model), instance.optimizer_step_was_skipped, ampkit.state_dict()))
    return results


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", ("O1", "O2", "O5"))
def test_accelerates_loop_does_what_a_loop_does(level, optimizer):
    spoiled = spoiled_at(level, 2)
    expected = trained_by_hand(level, optimizer, spoiled)
    for order in ORDERS:
        instance = accelerator()
        model, wrapped = prepared(instance, level, order, optimizer)
        results = trained(instance, model, wrapped, range(6), spoiled)
        assert_same_steps(results, expected)
        assert [skipped for _, skipped, _ in results] == [step == spoiled for step in range(6)]
        assert ampkit.step_was_skipped(wrapped) is False
        ampkit.close()
        assert instance.scaler is None and wrapped.scaler is None
        instance.backward(loss_of(model, 0))
        instance.clip_grad_norm_(model.parameters(), 1.0)  # Accelerate's own again
        wrapped.step()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", ("O1", "O2"))
def test_micro_batches_are_accumulated_and_clipped_as_in_a_loop(level, optimizer):
    expected = trained_by_hand(level, optimizer, spoiled=4, accumulate=3, clip=0.1, delays=True)
    instance = accelerator(gradient_accumulation_steps=3)
    model, wrapped = prepared(instance, level, optimizer=optimizer)
    results = trained(instance, model, wrapped, range(6), spoiled=4, clip=0.1)
    for (weights, _, state), (wanted, _, wanted_state) in zip(results, expected, strict=True):
        assert_equal(weights, wanted)
        assert state == wanted_state
    assert [skipped for _, skipped, _ in results] == [False] * 5 + [True]
    assert results[-1][2]["loss_scaler0"]["loss_scale"] == 128.0


@pytest.mark.parametrize("by", ("norm", "value"))
@pytest.mark.parametrize("level", ("O0", "O1", "O2"))
def test_gradients_are_clipped_as_in_float32(level, by):
    one = accelerator()
    model, optimizer = prepared(one, level)
    one.backward(loss_of(model, 0))
    clip = {"norm": one.clip_grad_norm_, "value": one.clip_grad_value_}[by]
    norm = clip(model.parameters(), 0.02)
    found = [master.grad for master in ampkit.master_params(optimizer)]
    wanted = assert_clipped_as_in_float32(level, found, by, 0.02)
    assert by == "value" or norm.item() == pytest.approx(wanted, rel=1e-6 if level == "O0" else 0.02)
    optimizer.step()


@pytest.mark.parametrize("born_in", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("level", ("O1", "O2", "O5"))
def test_a_resumed_run_goes_on_bit_for_bit(level, born_in, tmp_path):
    spoiled = spoiled_at(level, 1)
    instance = accelerator()
    model, optimizer = prepared(instance, level, born_in=born_in)
    trained(instance, model, optimizer, range(4), spoiled)
    instance.save_state(tmp_path)
    expected = trained(instance, model, optimizer, range(4, 6))
    ampkit.close()
    instance.free_memory()
    model, optimizer = prepared(instance, level, seed=9, born_in=born_in)
    instance.load_state(tmp_path)
    assert_same_steps(trained(instance, model, optimizer, range(4, 6)), expected)


def test_a_precision_that_an_earlier_trainer_left_in_the_environment_is_named(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    model = ampkit.initialize(net_with_norm(), opt_level="O1", verbosity=0)
    with pytest.raises(ampkit.ConfigurationError, match="ACCELERATE_MIXED_PRECISION=bf16 stands in the environment"):
        attach(accelerator())
    attach(accelerator(mixed_precision="no"))
    assert model is not None  # or its session would have ended


def test_what_cannot_go_together_is_refused():
    with pytest.raises(ampkit.NotInitializedError, match="called before"):
        attach(accelerator())
    one = accelerator(mixed_precision="bf16")
    model = ampkit.initialize(net_with_norm(), opt_level="O1", verbosity=0)
    with pytest.raises(ampkit.ConfigurationError, match="mixed_precision='bf16'"):
        attach(one)
    assert model is not None  # or its session would have ended
