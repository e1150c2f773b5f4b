"""Modules that test_lightning.py trains. Lightning takes seconds to import: the first test that needs this file imports it."""

import math

import lightning.pytorch as pl
from by_hand import OPTIMIZERS
from helpers import net_with_norm
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F

import ampkit
from ampkit.integrations.lightning import AmpkitPrecision

__all__ = ["AmpkitPrecision", "ModelCheckpoint", "Module", "WithForward", "trainer"]


class Module(pl.LightningModule):
    """A module whose steps call a part of it, and not its forward; the loss of the batch with that number is spoiled."""

    def __init__(self, optimizer="AdamW", spoiled=None):
        super().__init__()
        self.net, self.make_optimizer, self.spoiled = net_with_norm(), OPTIMIZERS[optimizer], spoiled
        self.skipped, self.norms = [], []

    def training_step(self, batch, index):
        x, y = batch
        return F.mse_loss(self.net(x).float(), y) * (math.inf if index == self.spoiled else 1.0)

    def configure_optimizers(self):
        return self.make_optimizer(self.net.parameters())

    def on_train_batch_end(self, *_):
        self.skipped.append(ampkit.step_was_skipped(self.optimizers()))

    def validation_step(self, batch, _):
        self.norms.append(F.mse_loss(self.net(batch[0]).float(), batch[1]).item())


class WithForward(Module):
    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        x, y = batch
        return F.mse_loss(self(x), y) * (math.inf if index == self.spoiled else 1.0)


def trainer(tmp_path, steps, *plugins, **settings):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(
        accelerator="cpu", max_steps=steps, plugins=list(plugins), default_root_dir=tmp_path, **{**quiet, **settings}
    )
