"""The picture of the README: its bytes are those that tensors take, and the README's words have its numbers."""

import importlib.util
import json
import re
from html import unescape

import pytest
from helpers import ROOT

spec = importlib.util.spec_from_file_location("make_picture", ROOT / "docs" / "make_picture.py")
make = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)


@pytest.fixture(scope="module")
def numbers():
    """The numbers that all four files hold."""
    files = [ROOT / "docs" / f"picture-{part}{theme}.svg" for part in ("bytes", "loss") for theme in ("", "-dark")]
    found = [re.findall(r"<dc:description>(.*?)</dc:description>", file.read_text(), re.DOTALL) for file in files]
    assert found[1:] == found[:-1]
    return json.loads(unescape(found[0][0]))


@pytest.mark.parametrize("name", make.CONTENDERS)
def test_bytes_in_the_picture_are_those_of_tensors_that_live(name, numbers):
    assert make.bytes_per_parameter(make.CONTENDERS[name]) == numbers["bytes"][name]


def test_bytes_are_those_that_one_adds_up_on_paper(numbers):
    # Weight, rest, gradient, two moments; in 8 bits with a float32 scale to 256 of them.
    on_paper = 4 + 4 + 8, 2 + 2 + 4, 2 + 2 + 2 + 8, 2 + 2 + 2 + 2 * (1 + 4 / 256)
    assert tuple(sum(its.values()) for its in numbers["bytes"].values()) == on_paper


def test_losses_in_the_picture_are_those_of_the_results(numbers):
    assert {name: round(curve.final, 4) for name, curve in make.curves().items()} == numbers["loss"]


def test_the_readme_says_what_the_picture_shows(numbers):
    (words,) = re.findall(r'<img src="docs/picture-loss\.svg" alt="([^"]*)">', (ROOT / "README.md").read_text())
    of_amp, of_bfloat16, _, in_8_bits = (f"{loss:.3f}" for loss in numbers["loss"].values())
    assert (
        f"torch in bfloat16 ends at {of_bfloat16}, torch.amp at {of_amp}, ampkit O5 with 8-bit moments at {in_8_bits}"
        in words
    )
    assert float(in_8_bits) == pytest.approx(float(of_amp), abs=1e-3) and float(of_bfloat16) > float(of_amp) + 0.03
