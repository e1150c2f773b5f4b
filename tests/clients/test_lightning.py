"""Lightning's own loop with `AmpkitPrecision`, judged by a loop written by hand with `scale_loss`, and by float32."""

import importlib.util
import math
import warnings

import pytest
import torch
from helpers import backward, net_with_norm, random_batch
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

import ampkit

if importlib.util.find_spec("lightning") is None:
    pytest.skip("`make clients` installs lightning", allow_module_level=True)

RULE = ampkit.DynamicLossScale(init_scale=256.0, growth_interval=3)


def settings_of(level):
    """O2 in float16, which the CPU's default is not."""
    settings = {"O1": {"loss_scale": RULE}, "O2": {"loss_scale": RULE, "cast_model_type": torch.float16}}
    return {"opt_level": level, "verbosity": 0, **settings.get(level, {})}


@pytest.fixture(scope="module")
def lightning():
    return importlib.import_module("lightning_modules")


def batches(steps):
    return torch.utils.data.DataLoader([random_batch(seed=step) for step in range(steps)], batch_size=None)


@pytest.fixture(autouse=True)
def without_advice():
    """Lightning advises workers and validation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def trained_by_hand(module, level, steps, spoiled=None, accumulate=1, clip=None):
    """(weights, whether each step was skipped, state of the loss scale)"""
    model, optimizer = ampkit.initialize(module.net, module.configure_optimizers(), **settings_of(level))
    skipped = []
    for step in range(steps):
        x, y = random_batch(seed=step)
        loss = F.mse_loss(model(x).float(), y) * (math.inf if step == spoiled else 1.0)
        if step % accumulate == 0:
            optimizer.zero_grad()
        backward(loss / accumulate, optimizer)
        if step % accumulate == accumulate - 1:
            if clip is not None:
                ampkit.clip_grad_norm_(optimizer, clip)
            optimizer.step()
        skipped.append(ampkit.step_was_skipped(optimizer))
    state = ampkit.state_dict()
    ampkit.close()
    return module.net.state_dict(), skipped, state


def assert_equal(found, expected):
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("optimizer", ("AdamW", "FusedAdam"))
@pytest.mark.parametrize("level", ("O1", "O2", "O5"))
def test_the_trainer_does_what_a_loop_does(level, optimizer, lightning, tmp_path):
    spoiled = 2 if level != "O5" else None
    expected, skipped, state = trained_by_hand(lightning.Module(optimizer), level, 6, spoiled)
    for kind in (lightning.Module, lightning.WithForward):
        precision, module = lightning.AmpkitPrecision(**settings_of(level)), kind(optimizer, spoiled)
        lightning.trainer(tmp_path, 6, precision).fit(module, batches(6))
        assert_equal(module.net.state_dict(), expected)
        assert module.skipped == skipped == [step == spoiled for step in range(6)]
        assert precision.state_dict() == state
        assert ampkit.current_session() is None and all(p.dtype is torch.float32 for p in module.parameters())


@pytest.mark.parametrize("level", ("O1", "O2"))
def test_micro_batches_are_accumulated_and_clipped_as_in_a_loop(level, lightning, tmp_path):
    expected, _, state = trained_by_hand(lightning.Module(), level, 6, accumulate=3, clip=0.1)
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
    twin = net_with_norm()
    x, y = random_batch(seed=0)
    F.mse_loss(twin(x), y).backward()
    clip = {"norm": torch.nn.utils.clip_grad_norm_, "value": torch.nn.utils.clip_grad_value_}[algorithm]
    clip(twin.parameters(), 0.02)
    tolerance = 1e-6 if level == "O0" else 0.02 * 0.05
    for gradient, other in zip(found.clipped, twin.parameters(), strict=True):
        assert gradient.dtype is torch.float32 and (gradient - other.grad).abs().max() <= tolerance


@pytest.mark.parametrize("level", ("O1", "O2", "O5"))
def test_a_resumed_run_goes_on_bit_for_bit(level, lightning, tmp_path):
    spoiled = 1 if level != "O5" else None
    whole, first, second = (
        lightning.Module(spoiled=spoiled),
        lightning.Module(spoiled=spoiled),
        lightning.Module(spoiled=spoiled),
    )
    precisions = [lightning.AmpkitPrecision(**settings_of(level)) for _ in range(3)]
    lightning.trainer(tmp_path, -1, precisions[0], max_epochs=3).fit(whole, batches(2))
    one = lightning.trainer(tmp_path, -1, precisions[1], max_epochs=2)
    one.fit(first, batches(2))
    one.save_checkpoint(tmp_path / "last.ckpt")  # after its session has ended
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert {value.dtype for value in saved["state_dict"].values()} == {torch.float32}
    assert saved["AmpkitPrecision"] == precisions[1].state_dict()
    again = lightning.trainer(tmp_path, -1, precisions[2], max_epochs=3)
    again.fit(second, batches(2), ckpt_path=tmp_path / "last.ckpt", weights_only=False)
    assert second.skipped == whole.skipped[4:]
    assert_equal(second.state_dict(), whole.state_dict())
    assert precisions[2].state_dict() == precisions[0].state_dict()


@pytest.mark.parametrize("born_in", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("level", ("O1", "O2", "O5"))
def test_a_resumed_run_of_a_model_in_lower_precision_goes_on_bit_for_bit(level, born_in, lightning, tmp_path):
    def run(path, **resume):
        keep = lightning.ModelCheckpoint(path, filename="{epoch}", save_top_k=-1)
        precision = lightning.AmpkitPrecision(**settings_of(level))
        settings = dict(max_epochs=3, callbacks=[keep], enable_checkpointing=True)
        lightning.trainer(path, -1, precision, **settings).fit(lightning.Module().to(born_in), batches(2), **resume)
        return torch.load(path / "epoch=2.ckpt", weights_only=False)

    whole = run(tmp_path / "whole")
    again = run(tmp_path / "again", ckpt_path=tmp_path / "whole" / "epoch=0.ckpt", weights_only=False)
    assert {value.dtype for value in whole["state_dict"].values() if value.is_floating_point()} == {torch.float32}
    assert_equal(again["state_dict"], whole["state_dict"])
    assert again["AmpkitPrecision"] == whole["AmpkitPrecision"]


def test_running_statistics_stay_finite_when_a_part_is_called_and_its_step_is_skipped(lightning, tmp_path):
    class WithBatchNorm(lightning.Module):
        def __init__(self, spoiled=None):
            super().__init__(spoiled=spoiled)
            self.net = torch.nn.Sequential(self.net, torch.nn.BatchNorm1d(3))

    clean, spoiled = WithBatchNorm(), WithBatchNorm(spoiled=1)
    lightning.trainer(tmp_path, 1, lightning.AmpkitPrecision(**settings_of("O2"))).fit(clean, batches(1))
    lightning.trainer(tmp_path, 2, lightning.AmpkitPrecision(**settings_of("O2"))).fit(spoiled, batches(2))
    assert spoiled.skipped == [False, True]
    statistics = {name for name, _ in spoiled.named_buffers()}
    found, wanted = (
        {name: value for name, value in one.state_dict().items() if name not in statistics} for one in (spoiled, clean)
    )
    assert_equal(found, wanted)
    assert all(value.isfinite().all() for value in spoiled.state_dict().values())


def test_evaluation_computes_at_the_level_too(lightning, tmp_path):
    module = lightning.Module()
    one = lightning.trainer(tmp_path, 2, lightning.AmpkitPrecision(**settings_of("O2")))
    one.fit(module, batches(2), batches(1))
    one.validate(module, batches(1), verbose=False)
    x, y = random_batch(seed=0)
    in_float32 = F.mse_loss(module.net(x), y).item()
    model = ampkit.initialize(module.net, **settings_of("O2"))
    assert module.norms[-1] == F.mse_loss(model(x), y).item() != in_float32


@pytest.mark.parametrize("validates", (False, True))
@pytest.mark.parametrize("level", ("O1", "O2", "O5"))
def test_the_average_of_lightnings_callback_is_float32_and_remains(level, validates, lightning, tmp_path):
    settings = settings_of(level)
    module = lightning.Module("FusedAdam")
    average = AveragedModel(net_with_norm(), avg_fn=get_ema_avg_fn(0.5), use_buffers=True)
    callback = importlib.import_module("lightning.pytorch.callbacks").EMAWeightAveraging(decay=0.5)
    precision = lightning.AmpkitPrecision(**settings)
    evaluation = dict(val_check_interval=2, num_sanity_val_steps=0, limit_val_batches=int(validates))
    lightning.trainer(tmp_path, 6, precision, callbacks=[callback], **evaluation).fit(module, batches(6), batches(1))

    twin = net_with_norm()
    optimizer = lightning.Module("FusedAdam").make_optimizer(twin.parameters())
    twin, optimizer = ampkit.initialize(twin, optimizer, **settings)
    for step in range(6):
        x, y = random_batch(seed=step)
        optimizer.zero_grad()
        backward(F.mse_loss(twin(x).float(), y), optimizer)
        optimizer.step()
        average.update_parameters(twin)
    assert_equal(module.net.state_dict(), average.module.state_dict())
    if validates:
        twin.load_state_dict(average.module.state_dict())
        x, y = random_batch(seed=0)
        assert module.norms[-1] == F.mse_loss(twin(x).float(), y).item()


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
    twin = net_with_norm()
    x, y = random_batch(seed=0)
    before = F.mse_loss(twin(x), y).item()
    assert module.norms[-1] < 0.95 * before
