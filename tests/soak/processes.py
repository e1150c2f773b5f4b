"""Several processes over gloo: ranks that are late, raise, die, or see a NaN alone; and another number of them after a restart."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

import ampkit
from ampkit.parallel import convert_syncbn_model, fully_shard

from .death import checkpoint
from .promise import promise
from .runs import OPTIMIZERS, copied

#: Time limit of a collective, and the time within which every rank must have ended, in seconds.
TIMEOUT, BOUND = 8.0, 40.0
ROWS = 8


@dataclass(frozen=True)
class Job:
    """The random choices of a job: how it trains, and what happens to one of its ranks."""

    wrapper: str
    level: str
    optimizer: str
    ranks: int
    parts: int
    steps: int
    seed: int
    culprit: int
    when: int
    batch_norm: bool = False

    @classmethod
    def drawn(cls, draw: random.Random, **fixed: Any) -> Job:
        ranks = fixed.get("ranks") or draw.choice([2, 2, 4])
        drawn = dict(
            wrapper=draw.choice(["ddp", "ddp", "fsdp2"]),
            level=draw.choice(["O1", "O2", "O5"]),
            optimizer=draw.choice(["AdamW foreach", "FusedAdam", "SGD foreach", "FusedSGD"]),
            ranks=ranks,
            parts=draw.choice([1, 2]),
            steps=6,
            seed=draw.randrange(1000),
            culprit=draw.randrange(ranks),
            when=draw.randrange(1, 5),
        )
        return cls(**{**drawn, **fixed})


class Trainer:
    """The part of a job that one rank trains; with a single process, the whole job."""

    def __init__(self, job: Job, rank: int = 0, ranks: int = 1) -> None:
        self.job, self.rank, self.ranks = job, rank, ranks
        torch.manual_seed(job.seed)
        norm = nn.BatchNorm1d(12) if job.batch_norm else nn.LayerNorm(12)
        model: nn.Module = nn.Sequential(nn.Linear(6, 12), norm, nn.Tanh(), nn.Linear(12, 8), nn.Linear(8, 3))
        if job.batch_norm and ranks > 1:
            model = convert_syncbn_model(model)
        if job.wrapper == "fsdp2" and ranks > 1:
            for part in (model[0], model[3], model):
                fully_shard(part, opt_level=job.level)
        self.optimizer = OPTIMIZERS[job.optimizer].make(model.parameters())
        rule = ampkit.DynamicLossScale(2.0**8, growth_interval=3)
        self.model, _ = ampkit.initialize(model, self.optimizer, opt_level=job.level, loss_scale=rule, verbosity=0)
        self.called = DistributedDataParallel(model) if job.wrapper == "ddp" and ranks > 1 else model

    def step(
        self, number: int, factor: float = 1.0, happens: Any = None, in_gradient: Any = None, in_batch: Any = None
    ) -> bool:
        """Run a step of all ranks, and return whether it was skipped. This rank's loss is multiplied by ``factor``.

        ``happens`` is called between forward and backward; ``in_gradient`` replaces an element of this rank's gradient,
        ``in_batch`` one of its last batch.
        """
        self.optimizer.zero_grad()
        for part in range(self.job.parts):
            is_last = part == self.job.parts - 1
            if self.job.wrapper == "fsdp2" and self.ranks > 1:
                self.model.set_requires_gradient_sync(is_last)
            apart = self.job.wrapper == "ddp" and self.ranks > 1 and not is_last
            with self.called.no_sync() if apart else nullcontext():
                rows = torch.randn(ROWS, 9, generator=torch.Generator().manual_seed(100 * number + part))
                shard = rows.chunk(self.ranks)[self.rank]
                if is_last and in_batch is not None:
                    shard[0, 0] = in_batch
                loss = F.mse_loss(self.called(shard[:, :6]).float(), shard[:, 6:]) / self.job.parts
                if is_last and happens is not None:
                    happens()
                with ampkit.scale_loss(loss * factor if is_last else loss, self.optimizer) as scaled:
                    scaled.backward()
                    if is_last and in_gradient is not None:
                        self.model[3].weight.grad.to_local().view(-1)[0] = in_gradient
        ampkit.clip_grad_norm_(self.optimizer, 1.0)
        self.optimizer.step()
        return ampkit.step_was_skipped(self.optimizer)

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights in float32, not sharded."""
        return whole(dict(self.model.state_dict()))


@dataclass
class Ended:
    """The end of a rank: a result, an error in words or a signal, and after how many seconds."""

    result: Any = None
    error: str | None = None
    status: int = 0
    seconds: float = 0.0


def on_ranks(count: int, work: Callable[[int], Any]) -> list[Ended]:
    """Run ``work(rank)`` in so many forks, which form a process group. Raise AssertionError if a rank does not end in time."""
    folder, began = Path(tempfile.mkdtemp()), time.monotonic()
    children = {}
    for rank in range(count):
        if (pid := os.fork()) == 0:
            _be_rank(rank, count, folder, work)
        children[pid] = rank
    ended = [Ended() for _ in range(count)]
    try:
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                time.sleep(0.01)
                hang = sorted(children.values())
                assert time.monotonic() - began < BOUND, f"ranks {hang} hang after {BOUND:g} seconds"
                continue
            end = ended[children.pop(pid)]
            end.status, end.seconds = os.waitstatus_to_exitcode(status), time.monotonic() - began
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    for rank, end in enumerate(ended):
        if (path := folder / f"rank{rank}.pt").exists():
            end.result, end.error = torch.load(path, weights_only=True)
    return ended


def _be_rank(rank: int, count: int, folder: Path, work: Callable[[int], Any]) -> None:
    result, error = None, None
    try:
        timeout = datetime.timedelta(seconds=TIMEOUT)
        store = dist.FileStore(str(folder / "store"), count)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timeout)
        result = work(rank)
    except BaseException as found:
        traceback.print_exc()
        error = f"{type(found).__name__}: {found}"
    torch.save((result, error), folder / f".rank{rank}.pt")
    os.rename(folder / f".rank{rank}.pt", folder / f"rank{rank}.pt")
    if error is None:  # nobody leaves while others still talk to it
        with contextlib.suppress(RuntimeError):
            dist.barrier()
    sys.stdout.flush()
    os._exit(0 if error is None else 1)


def trained(job: Job, rank: int, steps: Any = None, **fault: Any) -> dict[str, Any]:
    """Train ``steps`` on a rank and return its results. The culprit gives ``fault`` to `Trainer.step` in step ``job.when``."""
    trainer, skipped, buffers = Trainer(job, rank, dist.get_world_size()), [], []
    for number in range(job.steps) if steps is None else steps:
        is_it = number == job.when and rank == job.culprit
        skipped.append(trainer.step(number, **(fault if is_it else {})))
        buffers.append(copied(dict(trainer.model.named_buffers())))
    return {"weights": trainer.weights(), "skipped": skipped, "scale": scale(), "buffers": buffers}


def scale() -> dict[str, Any]:
    return ampkit.state_dict()["loss_scaler0"]


def agreed(job: Job, work: Callable[[int], Any], count: int | None = None) -> dict[str, Any]:
    """The result of all ranks, none of which may have failed."""
    ended = on_ranks(count or job.ranks, work)
    for rank, end in enumerate(ended):
        assert end.error is None and end.result is not None, (rank, end, job)
        assert_equal(end.result, ended[0].result, job)
    return ended[0].result


def assert_equal(actual: dict[str, Any], wanted: dict[str, Any], job: Job) -> None:
    """Compare weights bit for bit, skips and the loss scale."""
    for name, value in wanted["weights"].items():
        assert torch.equal(actual["weights"][name], value), (name, job)
    assert actual["skipped"] == wanted["skipped"] and actual["scale"] == wanted["scale"], (actual, wanted, job)


def assert_skips_one_step(result: dict[str, Any], job: Job) -> None:
    assert result["skipped"] == [number == job.when for number in range(job.steps)], (result["skipped"], job)


def in_one_process(job: Job, leaves_out: int | None = None) -> dict[str, torch.Tensor]:
    """The weights after the same steps on the joined batches."""
    trainer = Trainer(job)
    for number in range(job.steps):
        if number != leaves_out:
            trainer.step(number)
    weights = trainer.weights()
    ampkit.close()
    return weights


def assert_near(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], case: Any) -> None:
    """Compare weights as closely as lower precision allows when sums have another order."""
    for name, value in wanted.items():
        assert (actual[name] - value).abs().max() < 0.02, (name, actual[name], value, case)


@promise(
    "A NaN on one rank skips the step on all of them, and all go on with equal weights and scales.",
    "inf or NaN in the loss of one of two or four ranks, or in its shard of a gradient; DDP with no_sync, FSDP2",
)
def a_nan_on_one_rank_skips_the_step_on_all(draw: random.Random) -> int:
    job, value = Job.drawn(draw), draw.choice([math.nan, math.inf, -math.inf])
    where = "in_gradient" if job.wrapper == "fsdp2" and draw.random() < 0.7 else "factor"
    result = agreed(job, lambda rank: trained(job, rank, **{where: value}))
    assert_skips_one_step(result, job)
    assert_near(result["weights"], in_one_process(job, leaves_out=job.when), job)
    return 1


@promise(
    "Synchronised batch norm keeps its running statistics through a NaN on one rank.",
    "NaN in one rank's batch",
)
def batch_norm_over_ranks_survives_a_nan(draw: random.Random) -> int:
    job = Job.drawn(draw, wrapper="ddp", ranks=2, parts=1, batch_norm=True)
    result = agreed(job, lambda rank: trained(job, rank, in_batch=math.nan))
    assert_skips_one_step(result, job)
    before, after = result["buffers"][job.when - 1 : job.when + 1]
    for name, value in after.items():
        assert torch.equal(value, before[name] + name.endswith("num_batches_tracked")), (name, job)
    assert all(bool(value.isfinite().all()) for value in result["buffers"][-1].values()), job
    return 1


@promise(
    "A late rank changes nothing, bit for bit.",
    "up to three seconds of sleep between forward and backward",
)
def a_late_rank_changes_nothing(draw: random.Random) -> int:
    job, seconds = Job.drawn(draw), draw.uniform(0.5, 3.0)
    result = agreed(job, lambda rank: trained(job, rank, happens=lambda: time.sleep(seconds)))
    assert_equal(result, agreed(job, lambda rank: trained(job, rank)), job)
    assert_near(result["weights"], in_one_process(job), job)
    return 1


class Broken(Exception):
    pass


def raise_broken() -> None:
    raise Broken("of the script's own")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@promise(
    "No rank waits for one that is gone: each ends with an error.",
    "an exception or SIGKILL in the midst of a step of one rank",
)
def no_rank_waits_for_one_that_is_gone(draw: random.Random) -> int:
    job, happens = Job.drawn(draw), draw.choice([raise_broken, die])
    ended = on_ranks(job.ranks, lambda rank: trained(job, rank, happens=happens))
    for rank, end in enumerate(ended):
        if rank == job.culprit:
            assert end.status != 0 and (end.error is None or "of the script's own" in end.error), (end, job)
        else:
            assert end.error, f"rank {rank} has no error: {end} {job}"
    return 1


@promise(
    "No rank waits for ever for batches that do not come: each ends with an error within its group's time limit.",
    "one rank with fewer batches",
    share=0.6,
)
def no_rank_waits_for_batches_that_do_not_come(draw: random.Random) -> int:
    job = Job.drawn(draw)

    def work(rank: int) -> dict[str, Any]:
        result = trained(job, rank, steps=range(job.when if rank == job.culprit else job.steps))
        if rank == job.culprit:
            time.sleep(TIMEOUT + 3)
        return result

    if job.wrapper == "fsdp2":  # whose weights it takes all ranks to gather
        job = Job.drawn(draw, wrapper="ddp")
    ended = on_ranks(job.ranks, work)
    for rank, end in enumerate(ended):
        assert (end.error is None) == (rank == job.culprit), (rank, end, job)
    return 1


@promise(
    "Another number of ranks continues a run: weights bit for bit as saved, and afterwards near those of one process.",
    "a checkpoint of two or four ranks continued by one, two or four; DDP and FSDP2",
)
def another_number_of_ranks_continues(draw: random.Random) -> int:
    job, then = Job.drawn(draw), draw.choice([1, 2, 4])
    folder = Path(tempfile.mkdtemp())

    def first(rank: int) -> dict[str, Any]:
        trainer = Trainer(job, rank, job.ranks)
        for number in range(3):
            trainer.step(number)
        state = whole({"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()})
        if rank == 0:
            torch.save({**state, "ampkit": ampkit.state_dict()}, folder / "checkpoint")
        return {"weights": {}, "skipped": [], "scale": scale()}

    def second(rank: int) -> dict[str, Any]:
        trainer = Trainer(job, rank, then)
        state = torch.load(folder / "checkpoint", weights_only=True)
        checkpoint.load_model(trainer.model, state["model"])
        checkpoint.load_optimizer(trainer.optimizer, state["optimizer"])
        ampkit.load_state_dict(state["ampkit"])
        for name, value in trainer.weights().items():
            assert torch.equal(value, state["model"][name]), name
        skipped = [trainer.step(number) for number in range(3, job.steps)]
        return {"weights": trainer.weights(), "skipped": skipped, "scale": scale()}

    agreed(job, first)
    assert_near(agreed(job, second, then)["weights"], in_one_process(job), job)
    return 1


def whole(state: Any) -> Any:
    """Return a copy of nested tensors with every sharded tensor put together; all ranks must call it."""
    return copied(tree_map_only(DTensor, DTensor.full_tensor, state))
