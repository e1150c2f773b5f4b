"""Lightning, Accelerate and transformers' Trainer with DDP, under torchrun, judged by one process in float32; and Ray Train.

As a script, ``test_two_processes.py FRAMEWORK LEVEL FILE`` trains on two processes, and writes the result of each rank.
"""

import importlib.util
import math
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from helpers import ROOT, net_with_norm, random_batch
from torch.nn import functional as F

import ampkit

STEPS, ACCUMULATE, CLIP, SPOILED = 8, 2, 0.1, 5


def make_optimizer(params):
    return torch.optim.SGD(params, lr=0.5, momentum=0.9)


def batches(rank):
    return [random_batch(seed=10 * step + rank) for step in range(STEPS)]


def loss_of(model, batch, step, rank, spoiled=SPOILED):
    """The loss of a micro-batch: infinite on rank 1 alone for the spoiled one."""
    x, y = batch
    return F.mse_loss(model(x).float(), y) * (math.inf if step == spoiled and rank == 1 else 1.0)


def with_lightning(settings):
    import lightning_modules

    class Module(lightning_modules.Module):
        def training_step(self, batch, index):
            return loss_of(self.net, batch, index, self.global_rank)

        def configure_optimizers(self):
            return make_optimizer(self.parameters())

        def train_dataloader(self):
            return torch.utils.data.DataLoader(batches(self.global_rank), batch_size=None)

        def on_train_batch_end(self, _outputs, _batch, index):
            if index % ACCUMULATE == ACCUMULATE - 1:
                super().on_train_batch_end()

    module, plugin = Module(), lightning_modules.AmpkitPrecision(**settings)
    of_processes = dict(devices=2, strategy="ddp", use_distributed_sampler=False, max_epochs=1)
    of_steps = dict(accumulate_grad_batches=ACCUMULATE, gradient_clip_val=CLIP)
    lightning_modules.trainer(None, -1, plugin, **of_processes, **of_steps).fit(module)
    return module.net, module.skipped


def with_accelerate(settings):
    from accelerate import Accelerator

    from ampkit.integrations.accelerate import attach

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    bare = net_with_norm()
    model, optimizer = ampkit.initialize(bare, make_optimizer(bare.parameters()), **settings)
    attach(accelerator)
    model, optimizer = accelerator.prepare(model, optimizer)
    rank, skipped = accelerator.process_index, []
    for step, batch in enumerate(batches(rank)):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch, step, rank))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            skipped.append(accelerator.optimizer_step_was_skipped)
    ampkit.close()
    return bare, skipped


def with_transformers(settings):
    import transformers

    from ampkit.integrations.transformers import AmpkitMixin

    class WithLoss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.step = net_with_norm(), 0

        def forward(self, x, labels):
            self.step += 1
            return {"loss": loss_of(self.net, (x, labels), self.step - 1, dist.get_rank())}

    class Trainer(AmpkitMixin, transformers.Trainer):
        ampkit_settings = settings

        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(
                [{"x": x, "labels": y} for x, y in batches(self.accelerator.process_index)], batch_size=None
            )

    class Notes(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            skipped.append(trainer.accelerator.optimizer_step_was_skipped)

    skipped, model = [], WithLoss()
    arguments = transformers.TrainingArguments(
        sys.argv[3] + "-output", use_cpu=True, max_steps=STEPS // ACCUMULATE, gradient_accumulation_steps=ACCUMULATE, report_to=[],
        lr_scheduler_type="constant", max_grad_norm=CLIP, save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    optimizers = (make_optimizer(model.parameters()), None)
    trainer = Trainer(model, arguments, train_dataset=[0] * STEPS, optimizers=optimizers, callbacks=[Notes()])
    trainer.train()
    ampkit.close()
    return model.net, skipped


def trained_in_float32():
    model = net_with_norm()
    optimizer = make_optimizer(model.parameters())
    both = [batches(rank) for rank in range(2)]
    for step in range(STEPS):
        for rank in range(2):
            (loss_of(model, both[rank][step], step, rank, spoiled=None) / (2 * ACCUMULATE)).backward()
        if step % ACCUMULATE == ACCUMULATE - 1:
            if step != SPOILED:  # its step is skipped
                torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("level", ("O1", "O2", "O5"))
@pytest.mark.parametrize("framework", ("lightning", "accelerate", "transformers"))
def test_two_processes_train_as_one(framework, level, tmp_path):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"`make clients` installs {framework}")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, *launcher, __file__, framework, level, str(tmp_path / "rank")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (first, skipped), (second, skipped_there) = (torch.load(tmp_path / f"rank{rank}") for rank in range(2))
    assert skipped == skipped_there == [False, False, True, False]
    assert all(map(torch.equal, first, second))
    before, expected = list(net_with_norm().parameters()), trained_in_float32()
    moved = torch.cat([(one - start).flatten() for one, start in zip(expected, before, strict=True)])
    off = torch.cat([(one - other).flatten() for one, other in zip(first, expected, strict=True)])
    assert off.norm() <= 0.03 * moved.norm()


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason='pip install "ray[train]": 530 MB, no part of make clients'
)
def test_workers_of_ray_agree():
    command = [sys.executable, str(ROOT / "examples" / "ray_train" / "ray_train.py"), "--opt-level", "O2"]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert "2 ranks agree: True" in done.stdout, done.stdout + done.stderr


if __name__ == "__main__":
    framework, level, file = sys.argv[1:]
    settings = {"opt_level": level, "verbosity": 0, "loss_scale": ampkit.DynamicLossScale(init_scale=256.0)}
    train = {"lightning": with_lightning, "accelerate": with_accelerate, "transformers": with_transformers}[framework]
    model, skipped = train(settings)
    rank = dist.get_rank()
    torch.save(([param.detach() for param in model.parameters()], skipped), f"{file}{rank}")
    dist.barrier()
    dist.destroy_process_group()
