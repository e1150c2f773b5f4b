"""Rows of benchmarks/troubles.py: in each of these ways the tool names line, kind and cure, the cure cures, or nothing is wrong."""

import os

import pytest
from helpers import ROOT, python

#: By ways of training: the names of rows, and the expected cells.
ROWS = {
    ("plain", "O5", "alone"): {
        "log of p that has reached 0": ("right", "right", "right"),
        "the root of a distance that is 0": ("right", "right", "right"),
        "the deviation of one row": ("right", "right", "right"),
        "NaN in a row of the data": ("right", "right", "right"),
        "where around a log": ("right", "right", "right"),
        "the same entropy by log_softmax": ("right", "right", "right"),
        "healthy: a causal mask of -inf": ("healthy", "healthy", "healthy"),
        "healthy: NaN that is taken out": ("healthy", "healthy", "healthy"),
        "zero_grad after backward": ("right", "right", "right"),
        "detach in the forward pass": ("right", "right", "right"),
        "a norm in bfloat16": ("right", "healthy", "healthy"),
        "a penalty in float64": ("right", "right", "right"),
        "a learning rate far too high": ("right", "right", "right"),
        "a schedule that ends at 0": ("right", "right", "right"),
        "healthy: a loss that falls a million times": ("healthy", "healthy", "healthy"),
    },
    ("torch.amp", "O1", "O2"): {
        "a product of activations": ("right", "right", "right"),
        "an eps that float16 has not": ("right", "healthy", "healthy"),
        "masked_fill with -1e9": ("right", "right", "right"),
        "a loss whose gradient fits at no scale": ("right", "right", "right"),
        "healthy: a loss of large numbers": ("healthy", "healthy", "healthy"),
        "a loss divided by the variance of its targets": ("right", "right", "right"),
        "a schedule that raises the learning rate": ("right", "right", "right"),
    },
    ("plain",): dict.fromkeys(
        (
            "a row divided by its norm",
            "a softmax whose row is all masked",
            "a root of negative numbers",
            "a batch whose targets are all ignored",
            "a table of another dtype",
            "a frozen teacher in bfloat16",
            "a row divided by a small deviation",
            "an optimizer over another model",
            "a head that is newer than the optimizer",
            "a layer in a list",
            "positions in float64",
            "no lower precision at all",
        ),
        ("right",),
    ),
    ("O1",): dict.fromkeys(
        ("a region without casts", "a width of 60", "the norm of each gradient, read", ".data of an activation"),
        ("right",),
    ),
    ("torch.amp",): {"an optimizer over another model": ("right",)},
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the script forks")
@pytest.mark.parametrize("ways", ROWS)
def test_a_planted_trouble_has_its_line_its_kind_and_its_cure(ways):
    script = ROOT / "benchmarks" / "troubles.py"
    done = python(script, "--verbose", "--only", *ROWS[ways], "--ways", *ways)
    cells = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert {name: tuple(verdicts) for name, *verdicts in cells} == ROWS[ways], done.stdout + done.stderr
