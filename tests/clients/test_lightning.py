"""Lightning's loop with `AmpkitPrecision`, and Fabric with `AmpkitFabricPrecision`, judged by a loop by hand, and by float32."""

import importlib.util
import warnings

import pytest
import torch
from by_hand import (
    OPTIMIZERS,
    STEPS,
    assert_clipped_as_in_float32,
    assert_equal,
    assert_same_steps,
    loss_of,
    settings_of,
    spoiled_at,
    trained_by_hand,
    values,
)
from helpers import backward, net_with_norm, random_batch
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

import ampkit

if importlib.util.find_spec("lightning") is None:
    pytest.skip("`make clients` installs lightning", allow_module_level=True)


@pytest.fixture(scope="module")
def lightning():
    return importlib.import_module("lightning_modules")


def batches(steps):
    return torch.utils.data.DataLoader([random_batch(seed=step) for step in range(steps)], batch_size=None)


@pytest.fixture(autouse=True)
def without_advice():
    """Turn off Lightning's advice about workers and validation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", ("O1", "O2", "O5"))
def test_the_trainer_does_what_a_loop_does(level, optimizer, lightning, tmp_path):
    spoiled = spoiled_at(level, 2)
    expected, skipped, states = zip(*trained_by_hand(level, optimizer, spoiled))
    for kind in (lightning.Module, lightning.WithForward):
        precision, module = lightning.AmpkitPrecision(**settings_of(level)), kind(optimizer, spoiled)
        lightning.trainer(tmp_path, STEPS, precision).fit(module, batches(STEPS))
        assert_equal(module.net.state_dict(), expected[-1])
        assert module.skipped == list(skipped) == [step == spoiled for step in range(STEPS)]
        assert precision.state_dict() == states[-1]
        assert ampkit.current_session() is None and all(p.dtype is torch.float32 for p in module.parameters())


@pytest.mark.parametrize("level", ("O1", "O2"))
def test_micro_batches_are_accumulated_and_clipped_as_in_a_loop(level, lightning, tmp_path):
    expected, _, state = trained_by_hand(level, accumulate=3, clip=0.1)[-1]
    precision, module = lightning.AmpkitPrecision(**settings_of(level)), lightning.Module()
    lightning.trainer(tmp_path, 2, precision, accumulate_grad_batches=3, gradient_clip_val=0.1).fit(module, batches(6))
    assert_equal(module.net.state_dict(), expected)
    assert precision.state_dict() == state


@pytest.mark.parametrize("algorithm", ("norm", "value"))
@pytest.mark.parametrize("level", ("O0", "O1", "O2"))
def test_gradients_are_clipped_as_in_float32(level, algorithm, lightning, tmp_path):
    class Watched(lightning.Module):
        def configure_gradient_clipping(self, optimizer, **settings):
            super().configure_gradient_clipping(optimizer, **settings)
            self.clipped = [param.grad.clone() for param in ampkit.master_params(optimizer)]

    found = Watched()
    clipping = dict(gradient_clip_val=0.02, gradient_clip_algorithm=algorithm)
    lightning.trainer(tmp_path, 1, lightning.AmpkitPrecision(**settings_of(level)), **clipping).fit(found, batches(1))
    assert_clipped_as_in_float32(level, found.clipped, algorithm, 0.02)


@pytest.mark.parametrize("born_in", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("level", ("O1", "O2", "O5"))
def test_a_resumed_run_goes_on_bit_for_bit(level, born_in, lightning, tmp_path):
    """Resume from a checkpoint of the second epoch; in float32 also from one that was saved after its session had ended."""

    def run(name, epochs=3, **resume):
        keep = lightning.ModelCheckpoint(tmp_path / name, filename="{epoch}", save_top_k=-1)
        module = lightning.Module(spoiled=spoiled_at(level, 1)).to(born_in)
        settings = dict(max_epochs=epochs, callbacks=[keep], enable_checkpointing=True)
        one = lightning.trainer(tmp_path, -1, lightning.AmpkitPrecision(**settings_of(level)), **settings)
        one.fit(module, batches(2), **resume)
        one.save_checkpoint(tmp_path / name / "ended.ckpt")
        return module, torch.load(tmp_path / name / f"epoch={epochs - 1}.ckpt", weights_only=False)

    module, whole = run("whole")
    assert {value.dtype for value in whole["state_dict"].values()} == {torch.float32}
    run("shorter", epochs=2)
    for saved in ("whole/epoch=1.ckpt", *(["shorter/ended.ckpt"] if born_in is torch.float32 else [])):
        again, found = run(f"from {saved}", ckpt_path=tmp_path / saved, weights_only=False)
        assert again.skipped == module.skipped[4:]
        assert_equal(found["state_dict"], whole["state_dict"])
        assert found["AmpkitPrecision"] == whole["AmpkitPrecision"]


@pytest.mark.parametrize("validates", (False, True))
@pytest.mark.parametrize("level", ("O1", "O2", "O5"))
def test_the_average_of_lightnings_callback_is_float32_and_remains(level, validates, lightning, tmp_path):
    module = lightning.Module("FusedAdam")
    average = AveragedModel(net_with_norm(), avg_fn=get_ema_avg_fn(0.5), use_buffers=True)
    callback = importlib.import_module("lightning.pytorch.callbacks").EMAWeightAveraging(decay=0.5)
    precision = lightning.AmpkitPrecision(**settings_of(level))
    evaluation = dict(val_check_interval=2, num_sanity_val_steps=0, limit_val_batches=int(validates))
    one = lightning.trainer(tmp_path, STEPS, precision, callbacks=[callback], **evaluation)
    one.fit(module, batches(STEPS), batches(1))

    twin = net_with_norm()
    for weights, *_ in trained_by_hand(level, "FusedAdam"):
        twin.load_state_dict(weights)
        average.update_parameters(twin)
    assert_equal(module.net.state_dict(), average.module.state_dict())
    if validates:
        model = ampkit.initialize(average.module, **settings_of(level))
        assert module.norms[-1] == loss_of(model, 0).item()
    assert not {"_copy_average_to_current", "_swap_models"} & vars(callback).keys()


def test_steps_by_hand_with_two_optimizers(lightning, tmp_path):
    class Game(lightning.Module):
        automatic_optimization = False

        def __init__(self):
            super().__init__()
            self.other = net_with_norm(seed=1)

        def training_step(self, batch, index):
            for optimizer, net in zip(self.optimizers(), (self.net, self.other)):
                optimizer.zero_grad()
                self.manual_backward(F.mse_loss(net(batch[0]).float(), batch[1]))
                optimizer.step()

        def configure_optimizers(self):
            return [self.make_optimizer(net.parameters()) for net in (self.net, self.other)]

        def on_train_batch_end(self, *_):
            self.skipped.append([ampkit.step_was_skipped(optimizer) for optimizer in self.optimizers()])

    game, twin = Game(), Game()
    lightning.trainer(tmp_path, 6, lightning.AmpkitPrecision("O2", loss_scale=128.0, verbosity=0)).fit(game, batches(3))
    optimizers = twin.configure_optimizers()
    ampkit.initialize([twin.net, twin.other], optimizers, opt_level="O2", loss_scale=128.0, verbosity=0)
    for step in range(3):
        x, y = random_batch(seed=step)
        for optimizer, net in zip(optimizers, (twin.net, twin.other)):
            optimizer.zero_grad()
            backward(F.mse_loss(net(x).float(), y), optimizers)
            optimizer.step()
    assert game.skipped == [[False, False]] * 3
    assert_equal(game.state_dict(), twin.state_dict())


def test_an_optimizer_that_evaluates_again_gets_its_closure(lightning, tmp_path):
    module = lightning.Module()
    module.make_optimizer = lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=4)
    lightning.trainer(tmp_path, 3, lightning.AmpkitPrecision(**settings_of("O5"))).fit(module, batches(1), batches(1))
    assert module.norms[-1] < 0.95 * loss_of(net_with_norm(), 0).item()


# Fabric


@pytest.fixture(scope="module")
def Fabric():
    """Import Lightning before a test begins: it replaces torch.compile by a function of its own."""
    for adapter in ("fabric", "lightning"):
        importlib.import_module(f"ampkit.integrations.{adapter}")
    return importlib.import_module("lightning.fabric").Fabric


@pytest.mark.parametrize("level", ("O1", "O2", "O5"))
def test_fabric_does_what_a_loop_does(level, Fabric):
    def clip(optimizer, norm):
        torch.nn.utils.clip_grad_norm_(ampkit.master_params(optimizer), norm)

    spoiled = spoiled_at(level, 3)
    expected = trained_by_hand(level, spoiled=spoiled, clip=0.1, clip_by=clip)
    precision = ampkit.integrations.fabric.AmpkitFabricPrecision()
    fabric = Fabric(accelerator="cpu", devices=1, plugins=precision)
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


def test_fabric_without_a_session_and_the_trainers_plugin_are_refused(Fabric):
    plugins = ampkit.integrations.fabric.AmpkitFabricPrecision(), ampkit.integrations.lightning.AmpkitPrecision("O1")
    for plugin, word in zip(plugins, ("before ampkit.initialize", "For Fabric use")):
        fabric = Fabric(accelerator="cpu", devices=1, plugins=plugin)
        net = net_with_norm()
        model, _ = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        with pytest.raises(ampkit.NotInitializedError, match=word):
            fabric.backward(model(random_batch()[0]).sum())
