"""The DCGAN: a scaler for each loss, and at each level the first iterations are those of float32 within its rounding."""

import runpy

import pytest
import torch
from helpers import ROOT

for package in ("torchvision", "sklearn"):
    pytest.importorskip(package, reason="the example needs it")

SMALL = ["--iters", "2", "--batch-size", "16", "--width", "8", "--print-freq", "1"]


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(ROOT / "examples" / "dcgan" / "main_amp.py"))


@pytest.fixture(scope="module")
def float32_rows(example, tmp_path_factory):
    return example["main"]([*SMALL, "--opt-level", "O0", "--out", str(tmp_path_factory.mktemp("O0"))])


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_the_first_iterations_are_those_of_float32(example, float32_rows, level, tmp_path, capsys):
    rows = example["main"]([*SMALL, "--opt-level", level, "--out", str(tmp_path)])
    for found, expected in zip(rows, float32_rows, strict=True):
        for name, value in expected.items():
            # Logits are sums of hundreds of products, each rounded by up to 0.4%, behind norms over few images.
            assert found[name] == pytest.approx(value, rel=0.05), name
    scales = "1 1 1" if level == "O5" else "65536 65536 65536"
    assert capsys.readouterr().out.count(f"scales {scales}") == 2
    assert (tmp_path / "fake.png").stat().st_size > 1000


def test_images_are_the_digits_between_minus_1_and_1(example):
    images = example["load_images"]()
    assert images.shape == (1797, 1, 32, 32)
    assert (images.min(), images.max()) == (-1, 1)


def test_shapes_fit_each_other(example):
    noise = torch.randn(3, 64)
    image = example["Generator"](8)(noise)
    assert image.shape == (3, 1, 32, 32) and example["Discriminator"](8)(image).shape == (3,)
