"""Lightning, Accelerate and transformers' Trainer with DDP, under torchrun, judged by one process in float32."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, net_with_norm
from train_on_two import ACCUMULATE, CLIP, SPOILED, STEPS, batches, loss_of, make_optimizer


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
    script = ROOT / "tests" / "clients" / "train_on_two.py"
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=2",
            str(script),
            framework,
            level,
        ]
        + [str(tmp_path / "rank")],
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
