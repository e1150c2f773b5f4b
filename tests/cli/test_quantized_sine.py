"""The quantised sine: its wave and its model are those of the issue, its memory is counted right, and all of it runs small."""

import json
import math
import runpy

import pytest
import torch
from helpers import ROOT

pytest.importorskip("matplotlib", reason="the example draws")

SCRIPT = ROOT / "examples" / "quantized_sine" / "quantized_sine.py"


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(SCRIPT))


def test_the_wave_has_four_levels_and_its_frequencies(example):
    points, levels = (tensor.cpu() for tensor in example["wave"](17))
    assert points.shape == (1, 2, 17, 17) and (points.min(), points.max()) == (0, 1)
    assert torch.allclose(levels.unique(), torch.tensor([0, 1 / 3, 2 / 3, 1]))
    for row, column in ((0, 0), (3, 5), (16, 8)):
        x, y = points[0, :, row, column].double()
        total = math.cos(2 * math.pi * 4 * x) + math.cos(2 * math.pi * 2 * y)
        assert levels[0, 0, row, column] == pytest.approx(round((total + 2) * 3 / 4) / 3)


def test_the_model_is_four_convolutions_with_norms_between(example):
    sizes = [tuple(param.shape) for param in example["ConvModel"]().parameters() if param.dim() == 4]
    assert sizes == [(256, 2, 1, 1), (256, 256, 1, 1), (256, 256, 1, 1), (1, 256, 1, 1)]
    # Weights and biases of the four, and two numbers a channel of three norms.
    assert (
        sum(param.numel() for param in example["ConvModel"]().parameters())
        == 512 + 2 * 65536 + 256 + 3 * 256 + 1 + 3 * 512
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="on CUDA torch counts")
def test_memory_is_that_of_the_tensors_alive(example):
    with example["Meter"]() as meter:
        kept = torch.ones(1000)  # 4,000 bytes
        (kept * 2).sum()  # 4,000 more, and 4, then gone
        again = kept * 2
        again.view(10, 100).add_(1)  # no new memory
    assert meter.peak == pytest.approx(8000, abs=16)


@pytest.mark.parametrize("name", ["float32", "amp", "O1", "O2"])
def test_a_contender_learns_something_small(example, name, tmp_path):
    torch.manual_seed(0)
    row = example["contend"](name, 8, 6, tmp_path / "prediction.pt")
    assert set(row) == {"loss", "seconds", "bytes", "inference seconds", "inference bytes"}
    assert all(value > 0 for value in row.values()) and row["loss"] < 1
    prediction = torch.load(tmp_path / "prediction.pt")
    assert prediction.shape == (1, 1, 8, 8) and prediction.isfinite().all()
    weights = 4 * 133633
    if name == "O2":  # weights in half the bytes, but for the norms; masters are not needed to predict
        assert row["inference bytes"] < 0.75 * weights + 2 * 256 * 64 * 4
    assert json.dumps(row)


def test_the_table_compares_with_float32(example):
    base = dict.fromkeys(("loss", "seconds", "bytes", "inference seconds", "inference bytes"), 2.0)
    lines = example["table"]({"float32": base, "O2": {**base, "seconds": 1.0, "bytes": 3.0}}).splitlines()
    assert lines[-2].split() == ["ampkit", "O2", "-50.0%", "+50.0%", "+0.0%", "+0.0%"]
    assert lines[-1].split()[-4:] == ["-46.4%", "-49.8%", "-32.2%", "-49.8%"]  # AMD's, 2024
