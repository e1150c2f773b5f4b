"""docs/policy.md is what docs/make_policy.py writes today."""

import importlib.util
import math

import pytest
import torch
from helpers import ROOT

DOCS = ROOT / "docs"
# The numbers on the page are of the torch that constraints.txt names.
THE_PAGES_TORCH = f"torch=={torch.__version__.partition('+')[0]}\n" in (ROOT / "constraints.txt").read_text()
FLOOR = 1e-6  # errors below it are float32's, and differ from processor to processor


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("make_policy", DOCS / "make_policy.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def written():
    return (DOCS / "policy.md").read_text()


def rows_of_choices(page: str) -> dict[str, list[str]]:
    table = page.partition("| function | CUDA's list")[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {row[0].strip("`"): row[1:] for row in cells}


def numbers(cell: str) -> list[float]:
    words = {"exact": 0.0, "overflows": math.inf, "-": -1.0}
    return [words[word] if word in words else float(word) for word in cell.split(" / ")]


def agree(first: str, second: str) -> bool:
    """Whether two cells agree; a version of torch may lack kernels that another version has."""
    if "no kernel" in (first, second):
        return True
    for a, b in zip(numbers(first), numbers(second), strict=True):
        if min(a, b) < 0 or max(a, b) == math.inf:
            if a != b:
                return False
        elif not max(a, FLOOR) / 4 <= max(b, FLOOR) <= max(a, FLOOR) * 4:
            return False
    return True


def test_page_is_current(generator, written):
    fresh = generator.page()
    old, new = rows_of_choices(written), rows_of_choices(fresh)
    assert list(old) == list(new), "run python docs/make_policy.py"
    stale = [
        name
        for name in new
        if (old[name][:3], old[name][6]) != (new[name][:3], new[name][6])
        or (THE_PAGES_TORCH and not all(agree(*cells) for cells in zip(old[name][3:6], new[name][3:6], strict=True)))
    ]
    assert stale == [], "run python docs/make_policy.py"

    def text(page):
        head, _, rest = page.partition("| function | CUDA's list")
        return head + rest.partition("\n\n")[2]

    assert text(written) == text(fresh), "run python docs/make_policy.py"


def test_default_takes_lower_precision_only_where_that_is_safe(written):
    for name, (_, _, choice, float16, bfloat16, float32, _) in rows_of_choices(written).items():
        assert numbers(float32)[0] < 1e-5, name
        if choice in ("lower", "native"):
            # A few roundings of 2**-11 and 2**-8, and never an overflow; gradients pass through several products.
            assert numbers(float16)[0] < 4 * 2**-11, name
            assert numbers(bfloat16)[0] < 4 * 2**-8, name
