"""Where a session begins and ends: places where torch brings a thread's state back, other processes, tracers."""

import subprocess
import sys

import places
import pytest
import torch
from helpers import initialize_quietly, others_slow
from torch import nn

import ampkit
from ampkit.patching import Undo


@pytest.mark.parametrize("place", others_slow("inference_mode", "dispatch_mode", "forked_child", of=places.PLACES))
def test_session_that_begins_or_ends_there_leaves_torch_as_it_was(place):
    run = subprocess.run([sys.executable, places.__file__, place], capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.keys, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(torch.softmax(self.keys(x) @ x.transpose(1, 2), dim=-1).pow(2) @ x)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_symbolic_trace_of_an_initialized_model_computes_as_the_model(level):
    torch.manual_seed(0)
    x, plain = torch.randn(2, 5, 8), Attention()
    with torch.no_grad():
        want = plain(x)
        model, _ = initialize_quietly(plain, sgd, level)
        traced = torch.fx.symbolic_trace(model)
        found = traced(x.to(torch.bfloat16) if level == "O3" else x)
    assert (found.float() - want).norm() < 0.02 * want.norm()
    assert torch.is_autocast_enabled("cpu") is (level in ("O1", "O4"))


def _evaluate(model, x, answers):
    with torch.no_grad():
        answers.put(model(x).float().sum().item())


@pytest.mark.parametrize(
    "method, level",
    others_slow(("fork", "O2"), ("spawn", "O2"), of=[(m, f"O{n}") for m in ("fork", "spawn") for n in range(6)]),
)
def test_child_that_is_given_the_model_computes_its_float32_values(method, level):
    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Linear(6, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 2)), torch.randn(3, 6)
    with torch.no_grad():
        want = plain(x).sum().item()
    model, _ = initialize_quietly(plain, sgd, level)
    context = torch.multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    child = context.Process(target=_evaluate, args=(model, x, answers))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert answers.get() == pytest.approx(
        want, rel=0.02 if level == "O3" else 1e-5, abs=0.02 if level == "O3" else 1e-6
    )


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
def test_close_undoes_everything_else_where_something_fails(level, monkeypatch):
    product = torch.mm
    model, optimizer = initialize_quietly(nn.Linear(6, 3), sgd, level)
    other, _ = initialize_quietly(nn.Linear(6, 3), sgd, level)

    def fail():
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(ampkit.current_session().scaling, "synchronize", fail)
    with pytest.raises(RuntimeError, match="CUDA error"):
        ampkit.close()
    assert ampkit.current_session() is None and torch.mm is product
    assert all(param.dtype is torch.float32 for one in (model, other) for param in one.parameters())
    assert "_ampkit" not in vars(optimizer) and not torch.is_autocast_enabled("cpu")
    initialize_quietly(model, sgd, level)  # a later session works
    ampkit.close()


def test_number_that_float16_does_not_have_is_spoken_of():
    class Scores(nn.Linear):
        def forward(self, x):
            return super().forward(x).masked_fill(torch.ones(6, 6).triu(1).bool(), -1e9).softmax(-1)

    model, _ = ampkit.initialize(
        model := Scores(6, 6), sgd(model.parameters()), verbosity=0, patch_torch_functions_type=torch.float16
    )
    with pytest.raises(RuntimeError, match="without overflow") as caught:
        model(torch.randn(6, 6))
    assert "65504" in caught.value.__notes__[0] and "two dtypes" not in caught.value.__notes__[0]


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_vmap_over_a_backward_pass_through_batch_norm_is_refused_with_a_remedy(level):
    net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    model, _ = initialize_quietly(net, sgd, level)
    out, params = model(torch.randn(10, 5)).float().flatten(), list(model.parameters())
    with pytest.raises(ampkit.ConfigurationError, match="keep_fp32"):
        torch.vmap(lambda row: torch.autograd.grad(out, params, row, retain_graph=True))(torch.eye(10))
