"""benchmarks/convergence: its loop is torch's, its figures are arithmetic, and a run that is kept is not done again."""

import contextlib
import importlib
import statistics
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT

STEPS = 3
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """Import a module of benchmarks/ or benchmarks/convergence/, which is forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "convergence"))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def task(load):
    """The task of MNIST over images that are drawn here: the package with the real ones is for the benchmark alone."""
    mnist = load("mnist")
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(4100, 1, 28, 28, generator=generator), torch.randint(10, (4100,), generator=generator)
    mnist.data = lambda: images
    return mnist


def by_hand(task, autocast):
    """Return the losses of the task in torch alone: one loop, as a script has it."""
    x, y = task.data()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.LR, weight_decay=0.01)
    losses = []
    for factor in (1.0, 1.0, 0.5):  # a warm-up of one step, then half a cosine over two
        optimizer.param_groups[0]["lr"] = task.LR * factor
        chosen = torch.randint(4000, (task.BATCH,), generator=generator)
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            outputs = model(x[chosen])
        loss = F.cross_entropy(outputs.float(), y[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("precision", ["float32", "torch.autocast", "O1", "O5"])
def test_losses_are_those_of_a_loop_by_hand(task, precision, tmp_path):
    losses, accuracy = task.train(precision, 0, "CNN", STEPS, tmp_path)
    assert losses[0] == pytest.approx(2.3, abs=0.3)  # ln 10, before anything is learned
    expected = by_hand(task, autocast=precision != "float32")
    assert losses == pytest.approx(expected, rel=1e-6 if precision == "float32" else 5e-3)
    assert 0 <= accuracy <= 100


def test_a_run_that_is_kept_is_not_done_again(load, tmp_path):
    results, runs = load("resumable").Results, []
    for _ in range(2):
        known = results(tmp_path / "runs.jsonl")
        value = known.get(("CNN", "O5", 0, 600), lambda: runs.append(1) or {"value": 97.5})
        assert value == {"value": 97.5}
    assert runs == [1]
    assert known.get(("CNN", "O5", 1, 600), lambda: 2.0) == 2.0  # another seed is another run


def test_a_row_is_means_and_standard_deviations(load):
    row = load("convergence.__main__").row
    values, first = [3.0, 4.0, 5.0], [2.0, 4.0, 3.0]
    assert statistics.stdev(values) == 1.0 and statistics.stdev([1.0, 0.0, 2.0]) == 1.0
    assert row(values, first) == "4 ± 1 | +1 ± 1"
    assert row([2.0], [2.5]) == "2 | -0.5"


def test_products_by_way_of_float32_are_those_of_bfloat16(load):
    """Both add in float32 and round once, so they differ from float64's, rounded, by the last bit at most."""
    products = load("bfloat16_products")
    a, b, c = (torch.randn(32, 32, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3))
    exact = (a.double() @ b.double()).bfloat16().float()
    with products.ThroughFloat32():
        results = [a @ b, torch.addmm(c, a, b), torch.bmm(a[None], b[None])[0]]
    assert all(one.dtype is torch.bfloat16 for one in results)
    last_bit = exact.abs() * 2.0**-7
    assert ((results[0].float() - exact).abs() <= last_bit).all()
    assert torch.equal(results[0], results[2])
    sums = (c.double() + a.double() @ b.double()).bfloat16().float()
    assert ((results[1].float() - sums).abs() <= sums.abs() * 2.0**-7 + 1e-6).all()
