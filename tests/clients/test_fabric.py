"""Lightning Fabric with `AmpkitFabricPrecision`, judged by a loop written by hand with `scale_loss`."""

import importlib.util
import math

import pytest
import torch
from helpers import backward, net_with_norm, random_batch
from torch.nn import functional as F

import ampkit

if importlib.util.find_spec("lightning") is None:
    pytest.skip("`make clients` installs lightning", allow_module_level=True)


@pytest.fixture(scope="module")
def lightning():
    """Imported before a test begins: it puts a function of its own in the place of torch.compile."""
    lightning = importlib.import_module("lightning.fabric")
    for adapter in ("fabric", "lightning"):
        importlib.import_module(f"ampkit.integrations.{adapter}")
    return lightning


STEPS, SPOILED, CLIP = 6, 3, 0.1
RULE = ampkit.DynamicLossScale(init_scale=256.0)


def prepared(level):
    model = net_with_norm()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = {"loss_scale": RULE} if level != "O5" else {}
    return ampkit.initialize(model, optimizer, opt_level=level, verbosity=0, **settings)


def loss_of(model, step, level):
    x, y = random_batch(seed=step)
    return F.mse_loss(model(x).float(), y) * (math.inf if step == SPOILED and level != "O5" else 1.0)


def trained_by_hand(level):
    model, optimizer = prepared(level)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(loss_of(model, step, level), optimizer)
        torch.nn.utils.clip_grad_norm_(ampkit.master_params(optimizer), CLIP)
        optimizer.step()
    state = ampkit.state_dict()
    ampkit.close()
    return model.state_dict(), state


@pytest.mark.parametrize("level", ("O1", "O2", "O5"))
def test_fabric_does_what_a_loop_does(level, lightning):
    expected, state = trained_by_hand(level)
    precision = ampkit.integrations.fabric.AmpkitFabricPrecision()
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=precision)
    bare, inner = prepared(level)
    model, optimizer = fabric.setup(bare, inner)
    skipped = []
    for step in range(STEPS):
        optimizer.zero_grad()
        fabric.backward(loss_of(model, step, level))
        fabric.clip_gradients(model, optimizer, max_norm=CLIP, error_if_nonfinite=False)
        optimizer.step()
        skipped.append(ampkit.step_was_skipped(inner))
    assert ampkit.state_dict() == state and skipped == [step == SPOILED and level != "O5" for step in range(STEPS)]
    ampkit.close()
    found, start = bare.state_dict(), net_with_norm().state_dict()
    assert all(
        torch.equal(found[name], value) and not torch.equal(value, start[name]) for name, value in expected.items()
    )


def test_fabric_without_a_session_and_the_trainers_plugin_are_refused(lightning):
    plugins = ampkit.integrations.fabric.AmpkitFabricPrecision(), ampkit.integrations.lightning.AmpkitPrecision("O1")
    for plugin, word in zip(plugins, ("before ampkit.initialize", "For Fabric use")):
        fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=plugin)
        net = net_with_norm()
        model, _ = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        with pytest.raises(ampkit.NotInitializedError, match=word):
            fabric.backward(model(random_batch()[0]).sum())
