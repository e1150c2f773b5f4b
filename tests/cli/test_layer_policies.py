"""Layer policies: the precision of each layer, and the verbs of loss scaling one by one."""

import runpy

import pytest
import torch
from helpers import ROOT

F32, LOWER = torch.float32, torch.float16 if torch.cuda.is_available() else torch.bfloat16


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(ROOT / "examples" / "layer_policies" / "layer_policies.py"))


@pytest.mark.parametrize(
    "level, dtypes, scale",
    [
        ("O0", {"body": (F32, F32), "gate": (F32, F32), "head": (F32, F32)}, 1.0),
        ("O1", {"body": (F32, LOWER), "gate": (F32, F32), "head": (F32, F32)}, 65536.0),
        ("O2", {"body": (LOWER, LOWER), "gate": (F32, F32), "head": (F32, F32)}, 65536.0),
    ],
)
def test_each_layer_has_its_precision_and_gradients_their_scale(example, level, dtypes, scale):
    found, right, scaled, unscaled = example["train"](level, steps=60)
    assert found == dtypes
    assert torch.equal(scaled, unscaled * scale)  # a power of two changes no digit
    assert right > 0.9  # of four classes


def test_it_prints_what_its_page_shows(example, capsys):
    example["main"](steps=2)
    page = (ROOT / "examples" / "layer_policies" / "README.md").read_text()
    for line in capsys.readouterr().out.splitlines():
        assert line.rpartition(";")[0].replace("float16", "bfloat16").replace("bbfloat16", "bfloat16") in page
