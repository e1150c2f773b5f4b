"""torch.distributed.pipelining over two gloo processes: the loss scale is a factor of the loss, and an inf skips on both."""

import math

import pytest
import torch
import torch.distributed as dist
from helpers import as_one_of_two_ranks, assert_moved_alike, results_of_ranks, whole
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

import ampkit

SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
CASES = [(level, schedule) for level in ("O1", "O2", "O5") for schedule in SCHEDULES]
STEPS, SPOILED, PARTS = 4, 2, 4


def stages():
    torch.manual_seed(0)
    first, last = (nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh()), (nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    return nn.Sequential(*first), nn.Sequential(*last)


def data(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 6, generator=generator), torch.randn(16, 3, generator=generator)


def trained(rank, level, schedule):
    """Take steps of four micro-batches; the last stage spoils one micro-batch of one step."""
    model = stages()[rank]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ampkit.initialize(
        model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0, process_group=dist.group.WORLD
    )
    factor = torch.ones(())

    def loss_of(output, target):
        return F.mse_loss(output.float(), target) * factor

    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    pipeline = SCHEDULES[schedule](stage, n_microbatches=PARTS, loss_fn=loss_of)
    skipped = []
    for step in range(STEPS):
        x, y = data(step)
        optimizer.zero_grad()
        with ampkit.scale_loss(torch.ones(()), optimizer) as scale:
            factor = scale * math.inf if step == SPOILED else scale
            if rank == 0:
                pipeline.step(x)
            else:
                pipeline.step(target=y)
        optimizer.step()
        skipped.append(ampkit.step_was_skipped(optimizer))
    scale = ampkit.state_dict()["loss_scaler0"]["loss_scale"]
    weights = whole(model.state_dict())
    ampkit.close()
    return {"weights": weights, "skipped": skipped, "scale": scale}


def work(rank):
    return {str(case): trained(rank, *case) for case in CASES}


@pytest.mark.slow
def test_two_stages_train_as_one_model_in_float32_but_for_rounding(tmp_path):
    ranks = results_of_ranks(__file__, tmp_path)
    model = nn.Sequential(*stages())
    start = whole(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        x, y = data(step)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        if step != SPOILED:
            optimizer.step()
    for case in CASES:
        first, last = (rank[str(case)] for rank in ranks)
        assert first["skipped"] == last["skipped"] == [step == SPOILED for step in range(STEPS)], case
        assert first["scale"] == last["scale"] == 2.0**15, case
        found = {
            f"{index}.{name}": v for index, rank in enumerate(ranks) for name, v in rank[str(case)]["weights"].items()
        }
        assert_moved_alike(found, model.state_dict(), start, 0.02)


if __name__ == "__main__":
    as_one_of_two_ranks(work)
