"""The advice of a record, beside sums on paper, and its JSON."""

import inspect

import pytest
import torch
from test_recording import recorded
from torch import nn

from ampkit.insight.record import advice as advice_of
from ampkit.insight.record import recorder

BF16, FP16 = torch.bfloat16, torch.float16


ADVICE = []
FLOAT64 = "write .float() for .double(), or x.float() before it: numpy's arrays are float64, and what meets them"
AT_O1 = 'model, optimizer = ampkit.initialize(model, optimizer, opt_level="O1")'


def case(finding, change, make=tuple):
    """Decorate an iteration, called with what ``make`` returns, whose line ``# here`` has a finding and a change."""

    def add(run):
        ADVICE.append(pytest.param(run, make, finding, change, id=run.__name__))
        return run

    return add


@case(
    "item reads 9 numbers an iteration",
    "add them up as tensors, torch.stack(...).sum(), and read one number, every 100 steps",
)
def integers_that_are_read():
    labels = torch.arange(6)
    return int(labels.sum()), labels.max().item(), bool(labels.any()), [int(one) for one in labels]  # here


@case(
    *("linear computes in float64", FLOAT64),
    lambda: [nn.Linear(64, 64).double(), torch.randn(8, 64).double(), torch.ones(8, 64).double()],
)
def a_model_in_float64(model, x, gradient):
    model(x).backward(gradient)  # here


@case(
    *("every matrix product computes in float32 or float64", AT_O1),
    lambda: [torch.randn(64, 64), torch.randn(64, 64).double()],
)
def products_in_float32_and_in_float64(x, wide):
    return x @ x, wide @ wide


@pytest.mark.parametrize("run, make, finding, change", ADVICE)
def test_advice_names_line_figure_and_change(run, make, finding, change, monkeypatch):
    monkeypatch.setattr(advice_of, "computes_slowly_in", lambda dtype: False)
    given = make()
    record = recorded(lambda: run(*given))
    lines, first = inspect.getsourcelines(run)
    here = [first + i for i, line in enumerate(lines) if line.endswith("# here\n")]
    (row,) = [row for row in record.advice if row.found.startswith(finding)]
    assert row.change == change
    assert row.site == (f"test_recording_advice.py:{here[0]}" if here else "")
    assert [row.gain for row in record.advice] == sorted((row.gain for row in record.advice), reverse=True)
    words = " ".join(str(record).split())
    assert all(part in words for part in (row.site, row.found, row.change))


def test_lower_precision_is_not_advised_where_it_is_slow(monkeypatch):
    asked = set()
    for module in (advice_of, recorder):
        monkeypatch.setattr(module, "computes_slowly_in", lambda dtype: asked.add(dtype) or True)
    x, wide = torch.randn(60, 60, dtype=torch.bfloat16), torch.randn(64, 64)
    in_float32 = recorded(lambda: wide @ wide)
    in_bfloat16 = recorded(lambda: (x @ x, x.float() @ x.float()))  # of a size that matrix units do not take
    assert asked == {torch.bfloat16} and (in_float32.advice, in_float32.notes, in_bfloat16.advice) == ([], [], [])
    (note,) = in_bfloat16.notes
    assert note.startswith("this processor has no instructions for products in bfloat16")
    assert "leave out its .half()" in note


def test_operators_have_the_names_of_their_methods():
    a, i = torch.tensor([True, False]), torch.arange(2)

    def iteration():  # lines without floating-point numbers have one row each
        b = a & a
        b = b | a
        b = b ^ a
        b &= a
        n = i << 1
        return b, n % 2

    functions = {row.function for row in recorded(iteration).calls}
    assert functions == {"and", "or", "xor", "iand", "lshift", "mod"}


class Promoted(nn.Module):
    """A model whose scale, made float32 by the script, keeps a product out of lower precision."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(64, 64), nn.Linear(64, 64), nn.Parameter(torch.ones(64))

    def forward(self, x):
        h = self.up(x) * self.scale.float()
        return torch.einsum("bi,oi->bo", h, self.down.weight.to(h.dtype))


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_what_promotes_a_product_is_named_in_scripts_without_ampkit(dtype, monkeypatch):
    monkeypatch.setattr(advice_of, "computes_slowly_in", lambda dtype: False)
    model = Promoted().to(dtype)
    record = recorded(lambda: model(torch.randn(16, 64).to(dtype)).sum().backward())
    (row,) = [row for row in record.advice if "computes in float32" in row.found]
    line = inspect.getsourcelines(Promoted)[1] + 8
    assert "einsum" in row.found and f"promoted at test_recording_advice.py:{line}" in row.found
    assert f"by .float() at test_recording_advice.py:{line}" in f"{row.found} {row.change}"


@pytest.mark.parametrize("line", ["scaler.unscale_(one)", "scaler.step(one)", "scaler.update()"])
def test_a_line_that_calls_the_scaler_is_no_finding(line):
    """The scaler computes a reciprocal in float64, and reads a number for each of four optimizers."""
    scaler = torch.amp.GradScaler("cpu")
    layers = [nn.Linear(8, 8) for _ in range(4)]
    optimizers = [torch.optim.SGD(layer.parameters(), 0.1) for layer in layers]

    def iteration():
        scaler.scale(sum(layer(torch.ones(8, 8)).sum() for layer in layers)).backward()
        for one in optimizers:
            scaler.unscale_(one)
        for one in optimizers:
            scaler.step(one)
        scaler.update()

    record = recorded(iteration)
    rows = [row for row in record.calls if row.source == line and row.phase == "forward"]
    assert {row.function for row in rows} == {"GradScaler"}
    assert [advice for advice in record.advice if advice.site in {row.site for row in rows}] == []
