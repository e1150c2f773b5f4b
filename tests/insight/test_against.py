"""`ampkit.diagnose(iteration, against="fp32")`: errors agree with two runs of the iteration, and the worst line made them."""

import inspect
import math
from functools import partial

import pytest
import torch
from helpers import Operators, backward, initialize_quietly
from torch import nn
from torch.nn import functional as F

import ampkit


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    return next(first + i for i, line in enumerate(lines) if text in line)


def a_divergence(x, y):
    """Return the KL divergence between distributions that are nearly equal."""
    log_p, log_q = F.log_softmax(x, -1), F.log_softmax(y, -1)
    difference = log_p - log_q
    return (log_p.exp() * difference).float().sum(-1).mean()


@pytest.fixture
def logits():
    torch.manual_seed(0)
    x = torch.randn(8, 16)
    return x, x + torch.randn(8, 16) / 8


def run(x, y, dtype):
    """Return loss and gradient of the divergence; ``x`` is created in bfloat16, ``y`` is cast to it where that is the dtype."""
    leaf = x.bfloat16().to(dtype).requires_grad_()
    loss = a_divergence(leaf, y.to(dtype))
    loss.backward()
    return loss.item(), leaf.grad.double()


def test_a_cancellation_is_the_worst_line_and_the_errors_are_those_of_two_runs(logits):
    x, y = logits
    leaf = x.bfloat16().requires_grad_()
    report = ampkit.diagnose(lambda: a_divergence(leaf, y.bfloat16()).backward(), against="fp32")

    (narrow_loss, narrow), (loss, exact) = run(x, y, torch.bfloat16), run(x, y, torch.float64)
    assert report.loss == pytest.approx(abs(narrow_loss / loss - 1), rel=0.05)
    # Autograd rounds the gradient of a leaf in bfloat16 once more: by less than 2**-8.
    assert report.gradient == pytest.approx(float((narrow - exact).norm() / exact.norm()), abs=2.0**-8)
    assert report.gradient > 0.03

    forward = [row for row in report.rows if not row.backward]
    assert {row.function for row in forward} >= {"torch.Tensor.__sub__"}
    row = next(row for row in forward if row.function == "torch.Tensor.__sub__")
    assert (row.site.file, row.site.line) == (__file__, line_of(a_divergence, "difference = "))
    assert row.error > 10 * row.error_of_inputs and row.dtype is torch.bfloat16
    assert "difference = log_p - log_q" in str(report)


@pytest.mark.parametrize("level", ["O1", "O4", "O5"])
def test_a_classifier_has_errors_of_rounding_and_no_line_that_made_more(level):
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    model, optimizer = initialize_quietly(model, torch.optim.Adam, level)
    x, target = torch.randn(8, 16), torch.arange(8) % 4

    def iteration():
        backward(F.cross_entropy(model(x), target), optimizer)

    found = ampkit.diagnose(iteration, against="fp32")
    assert not found and 0 < found.loss < 0.01 and 0 < found.gradient < 0.03
    assert str(found).startswith(f"against float32, in {found.operations} operations: loss 0.")
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("make, shape", [(nn.Linear, (64, 8)), (partial(nn.Conv1d, kernel_size=1), (64, 8, 4))])
def test_the_culprit_is_the_norm_that_takes_away_the_mean_and_not_a_bias_whose_gradient_is_0(make, shape):
    model = nn.Sequential(make(8, 16), nn.BatchNorm1d(16), nn.ReLU())
    model, optimizer = initialize_quietly(model, torch.optim.Adam, "O5")
    x = torch.randn(shape) + 100

    def iteration():
        loss = model(x).float().square().sum(1).mean()
        backward(loss, optimizer)

    rows = ampkit.diagnose(iteration, against="fp32").rows
    assert [row.function for row in rows if not row.backward] == ["torch.nn.functional.batch_norm"]
    assert max(row.error for row in rows) < 1.5  # the bias' gradient is off by 40 times its value


def test_in_float32_nothing_differs():
    x = torch.randn(3, requires_grad=True)
    found = ampkit.diagnose(lambda: (x.exp() - x.exp().clone()).sum().backward(), against="fp32")
    assert (found.loss, found.gradient, found.rows) == (0.0, 0.0, ())


def test_a_loss_that_is_not_finite_is_not_near_float32s():
    """4 times 200 squared is 160000, beyond float16; inf - inf is NaN."""
    x = torch.full((4,), 200.0, dtype=torch.float16, requires_grad=True)
    for loss_of, expected in ((lambda y: y, math.inf), (lambda y: y - y, math.nan)):
        found = ampkit.diagnose(lambda: loss_of(x.square().sum()).backward(), against="fp32")  # noqa: B023
        assert found.loss == pytest.approx(expected, nan_ok=True)


def test_what_an_operator_writes_is_written_once_and_each_operator_counts_once():
    x, total, seen = torch.full((3,), 1.1), torch.zeros(3), []

    def iteration():
        total.add_(x.bfloat16())
        seen.append(total.tolist())

    with Operators() as operators:
        iteration()
    found = ampkit.diagnose(iteration, against="fp32")
    assert seen == [[step * 1.1015625] * 3 for step in (1, 2)]  # what bfloat16 makes of 1.1
    assert found.operations == len(operators.names) == 2


def test_running_statistics_are_put_back_and_random_numbers_are_shared():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).bfloat16()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run = lambda: model(torch.randn(8, 4).bfloat16()).float().square().sum().backward()  # noqa: E731
    diagnosis = ampkit.diagnose(run, against="fp32")
    assert diagnosis.loss < 0.02
    assert not [row for row in diagnosis.rows if "empty" in row.op]  # dropout's memory before it is filled
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_another_precision_is_refused():
    with pytest.raises(ValueError, match="against='fp64' is not accepted: expected 'fp32'"):
        ampkit.diagnose(lambda: None, against="fp64")
