"""transformers' Trainer with `AmpkitMixin`, judged by a loop written by hand and by float32; of 4.57, and of the newest."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from by_hand import STEPS, assert_equal, settings_of, spoiled_at, trained_by_hand, values
from helpers import net_with_norm, random_batch
from torch import nn
from torch.nn import functional as F

import ampkit
import ampkit.apex
from ampkit.integrations.transformers import AmpkitMixin

transformers = pytest.importorskip("transformers", reason="`make clients` installs transformers")
pytest.importorskip("accelerate", reason="`make clients` installs accelerate")

ROWS = 4


class WithLoss(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        self.net = net_with_norm(seed=seed)

    def forward(self, x, labels):
        return {"loss": F.mse_loss(self.net(x).float(), labels.float())}


def rows(spoiled=None):
    """Rows for batches of four; a label of the spoiled batch is infinite."""
    examples = []
    for step in range(STEPS):
        x, y = random_batch(seed=step, rows=ROWS)
        if step == spoiled:
            y[0, 0] = math.inf
        examples += [{"x": x[row], "labels": y[row]} for row in range(ROWS)]
    return examples


def trainer(folder, level, model=None, spoiled=None, **arguments):
    class AtLevel(AmpkitMixin, transformers.Trainer):
        ampkit_settings = settings_of(level)

        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(self.train_dataset, ROWS, collate_fn=transformers.default_data_collator)

        def training_step(self, *args, **kwargs):
            self.scales.append(ampkit.state_dict()["loss_scaler0"]["loss_scale"])
            return super().training_step(*args, **kwargs)

    settings = dict(
        output_dir=folder, use_cpu=True, max_steps=STEPS, per_device_train_batch_size=ROWS, report_to=[],
        lr_scheduler_type="constant", learning_rate=0.01, save_strategy="no", disable_tqdm=True, logging_strategy="no",
        max_grad_norm=0.1,
    )  # fmt: skip
    arguments = transformers.TrainingArguments(**{**settings, **arguments})
    made = AtLevel(model=model or WithLoss(), args=arguments, train_dataset=rows(spoiled))
    made.scales = []
    return made


def by_hand(folder, level, spoiled=None, accumulate=1, **arguments):
    """Train by hand with the model and the optimizer of a Trainer; returns (weights, state of the loss scale)."""
    arguments = transformers.TrainingArguments(folder, use_cpu=True, learning_rate=0.01, **arguments)
    twin = transformers.Trainer(WithLoss(), arguments)

    def loss_of(model, step, spoiled):
        batch = rows(spoiled)[step * ROWS : (step + 1) * ROWS]
        return model(**transformers.default_data_collator(batch))["loss"]

    settings = dict(clip=0.1, delays=True, model=twin.model, loss_of=loss_of)
    weights, _, state = trained_by_hand(level, twin.create_optimizer(), spoiled, accumulate, **settings)[-1]
    return weights, state


@pytest.mark.parametrize("accumulate", (1, 3))
@pytest.mark.parametrize("level", ("O1", "O2", "O5"))
def test_the_trainer_does_what_a_loop_does(level, accumulate, tmp_path):
    spoiled = spoiled_at(level, 2)
    expected, state = by_hand(tmp_path, level, spoiled, accumulate)
    run = trainer(tmp_path, level, None, spoiled, gradient_accumulation_steps=accumulate, max_steps=STEPS // accumulate)
    run.train()
    assert_equal(run.model.state_dict(), expected)
    assert ampkit.state_dict() == state
    skipped = spoiled is not None  # where the scheduler waits
    assert run.lr_scheduler.last_epoch == STEPS // accumulate - skipped
    if spoiled is not None and accumulate == 1:
        assert run.scales == [256, 256, 256, 128, 128, 128]
        assert state["loss_scaler0"]["loss_scale"] == 256.0  # after three clean ones


@pytest.mark.parametrize("born_in", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("level", ("O1", "O2", "O5"))
def test_a_resumed_run_goes_on_bit_for_bit(level, born_in, tmp_path):
    spoiled = spoiled_at(level, 1)
    whole = trainer(tmp_path / "whole", level, WithLoss().to(born_in), spoiled, save_strategy="steps", save_steps=4)
    whole.train()
    expected, state = values(whole.model), ampkit.state_dict()
    ampkit.close()
    again = trainer(tmp_path / "again", level, WithLoss(seed=9).to(born_in), spoiled)
    again.train(resume_from_checkpoint=tmp_path / "whole" / "checkpoint-4")
    assert len(again.scales) == 2
    assert_equal(again.model.state_dict(), expected)
    assert ampkit.state_dict() == state


def test_a_second_train_goes_on_with_the_session(tmp_path):
    run = trainer(tmp_path, "O2", spoiled=2)
    run.train()
    session = ampkit.current_session()
    run.train()
    assert ampkit.current_session() is session and run.scales[6] == 256.0
    assert {param.dtype for param in run.model.net[0].parameters()} == {torch.float16}


def test_what_is_saved_is_float32(tmp_path):
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=50
    )
    model = transformers.BertForMaskedLM(config)
    tokens = torch.randint(0, 50, (8, 5), generator=torch.Generator().manual_seed(0))
    run = trainer(tmp_path, "O2", model, max_steps=2)
    run.train_dataset = [{"input_ids": row, "labels": row} for row in tokens]
    run.train()
    assert model.bert.encoder.layer[0].output.dense.weight.dtype is torch.float16
    run.save_model(tmp_path / "saved")
    weights = values(model)
    ampkit.close()
    loaded = transformers.BertForMaskedLM.from_pretrained(tmp_path / "saved")
    assert {param.dtype for param in loaded.parameters()} == {torch.float32}  # in 5 that of config.json
    assert transformers.AutoConfig.from_pretrained(tmp_path / "saved").dtype in (torch.float32, "float32")
    assert_equal({name: loaded.state_dict()[name] for name in weights}, weights)


def test_a_trainer_that_casts_by_itself_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # which the Trainer changes for good
    one = trainer(tmp_path, "O1", bf16=True)
    with pytest.raises(ampkit.ConfigurationError, match="mixed_precision='bf16'"):
        one.train()
    assert ampkit.current_session() is None


OPTIMIZERS = ["adamw_torch_fused", "adafactor", "sgd"]
if transformers.__version__.startswith("4."):  # transformers 5 knows no apex
    OPTIMIZERS.append("adamw_apex_fused")


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_optimizers_that_the_trainer_knows_by_name(optim, tmp_path):
    ampkit.apex.install()
    try:
        expected, _ = by_hand(tmp_path, "O2", optim=optim)
        run = trainer(tmp_path, "O2", optim=optim)
        run.train()
    finally:
        ampkit.apex.uninstall()
    assert_equal(run.model.state_dict(), expected)


@pytest.mark.parametrize("left", ("bf16", "fp16"))
def test_what_an_earlier_trainer_left_in_the_environment_is_not_meant(left, tmp_path, monkeypatch, caplog):
    expected, _ = by_hand(tmp_path, "O1")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", left)
    run = trainer(tmp_path, "O1")
    assert f"ACCELERATE_MIXED_PRECISION={left} stands in the environment" in caplog.text
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == left  # it is not ours
    run.train()
    assert_equal(run.model.state_dict(), expected)


class OwnTrainer(transformers.Trainer):
    pass


class WithSettings(AmpkitMixin):
    ampkit_settings: ClassVar = {"opt_level": "O5"}


class Logs:
    """A mixin that is no Trainer."""


@pytest.mark.parametrize(
    "bases",
    ((transformers.Trainer, AmpkitMixin), (OwnTrainer, AmpkitMixin), (transformers.Seq2SeqTrainer, WithSettings)),
    ids=str,
)
def test_a_mixin_behind_the_trainer_is_refused(bases):
    with pytest.raises(ampkit.ConfigurationError, match=rf"class Mine\(AmpkitMixin, {bases[0].__name__}\)"):
        type("Mine", bases, {})
    type("Mine", (Logs, *reversed(bases)), {})
    inner = type("Inner", (AmpkitMixin, transformers.Trainer), {})
    type("Mine", (OwnTrainer, inner), {})  # its super() goes on to the mixin


# `make clients` puts it there.
NEWEST = Path(os.environ.get("AMPKIT_NEWEST_TRANSFORMERS", Path(sys.prefix) / "transformers-newest"))


@pytest.mark.slow
@pytest.mark.skipif(not transformers.__version__.startswith("4."), reason="runs itself with another transformers")
@pytest.mark.skipif(not NEWEST.is_dir(), reason="`make clients` installs the newest transformers beside the pinned one")
def test_the_newest_transformers_too():
    paths = os.pathsep.join(filter(None, [str(NEWEST), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed, 1 skipped in" in done.stdout
