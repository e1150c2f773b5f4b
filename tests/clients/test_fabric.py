"""Lightning Fabric with `AmpkitFabricPrecision`, judged by a loop written by hand with `scale_loss`."""

import importlib.util

import pytest
import torch
from by_hand import OPTIMIZERS, STEPS, assert_same_steps, loss_of, settings_of, spoiled_at, trained_by_hand, values
from helpers import net_with_norm, random_batch

import ampkit

if importlib.util.find_spec("lightning") is None:
    pytest.skip("`make clients` installs lightning", allow_module_level=True)


@pytest.fixture(scope="module")
def lightning():
    """Import Lightning before a test begins: it replaces torch.compile by a function of its own."""
    lightning = importlib.import_module("lightning.fabric")
    for adapter in ("fabric", "lightning"):
        importlib.import_module(f"ampkit.integrations.{adapter}")
    return lightning


@pytest.mark.parametrize("level", ("O1", "O2", "O5"))
def test_fabric_does_what_a_loop_does(level, lightning):
    def clip(optimizer, norm):
        torch.nn.utils.clip_grad_norm_(ampkit.master_params(optimizer), norm)

    spoiled = spoiled_at(level, 3)
    expected = trained_by_hand(level, spoiled=spoiled, clip=0.1, clip_by=clip)
    precision = ampkit.integrations.fabric.AmpkitFabricPrecision()
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=precision)
    bare = net_with_norm()
    bare, inner = ampkit.initialize(bare, OPTIMIZERS["AdamW"](bare.parameters()), **settings_of(level))
    model, optimizer = fabric.setup(bare, inner)
    results = []
    for step in range(STEPS):
        optimizer.zero_grad()
        fabric.backward(loss_of(model, step, spoiled))
        fabric.clip_gradients(model, optimizer, max_norm=0.1, error_if_nonfinite=False)
        optimizer.step()
        results.append((values(bare), ampkit.step_was_skipped(inner), ampkit.state_dict()))
    assert_same_steps(results, expected)
    assert [skipped for _, skipped, _ in results] == [step == spoiled for step in range(STEPS)]


def test_fabric_without_a_session_and_the_trainers_plugin_are_refused(lightning):
    plugins = ampkit.integrations.fabric.AmpkitFabricPrecision(), ampkit.integrations.lightning.AmpkitPrecision("O1")
    for plugin, word in zip(plugins, ("before ampkit.initialize", "For Fabric use")):
        fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=plugin)
        net = net_with_norm()
        model, _ = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        with pytest.raises(ampkit.NotInitializedError, match=word):
            fabric.backward(model(random_batch()[0]).sum())
