"""Places where a session begins and ends: where torch restores a thread's state, other processes, tracers."""

import subprocess
import sys

import places
import pytest
import torch
from helpers import initialize_quietly, others_slow
from torch import nn

import ampkit
from ampkit.patching import Undo

TOGETHER = "inference_mode dispatch_mode forked_child"


@pytest.mark.parametrize(
    "where",
    others_slow(
        TOGETHER, "interpreter_exit", of=[TOGETHER, *(place for place in places.PLACES if place not in TOGETHER)]
    ),
)
def test_session_that_begins_or_ends_there_leaves_torch_as_it_was(where):
    run = subprocess.run([sys.executable, places.__file__, *where.split()], capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def test_undo_goes_on_after_an_error_and_raises_the_first():
    done, undo = [], Undo()

    def fail(number):
        raise ValueError(f"number {number}")

    undo.callback(done.append, "last")
    undo.callback(fail, 2)
    undo.callback(done.append, "first")
    undo.callback(fail, 1)
    with pytest.raises(ValueError, match="number 1"):
        undo.close()
    assert done == ["first", "last"]


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_vmap_over_a_backward_pass_through_batch_norm_is_refused_with_a_remedy(level):
    net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    model, _ = initialize_quietly(net, sgd, level)
    out, params = model(torch.randn(10, 5)).float().flatten(), list(model.parameters())
    with pytest.raises(ampkit.ConfigurationError, match="keep_fp32"):
        torch.vmap(lambda row: torch.autograd.grad(out, params, row, retain_graph=True))(torch.eye(10))
