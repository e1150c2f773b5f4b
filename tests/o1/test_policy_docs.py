"""docs/policy.md is what docs/make_policy.py writes today."""

import importlib.util
import math

import pytest
import torch
from helpers import ROOT

from ampkit.policy import TABLES, CastKind

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


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2e-04 / exact", "1e-04 / 3e-07", True),
        ("2e-04 / exact", "1e-03 / exact", False),
        ("overflows / exact", "2e-04 / exact", False),
        ("2e-04 / -", "2e-04 / 2e-04", False),
    ],
)
def test_cells_agree_within_a_factor(one, other, same):
    assert agree(one, other) is same


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


def test_every_row_of_the_default_is_on_the_page(written):
    missing = [
        name
        for group in TABLES["default"]
        for name in group.names
        if f"`{name}`" not in written or group.reason not in written
    ]
    assert missing == []


def test_generator_measures_torch_as_it_is(generator):
    """The numbers come from torch without any patches."""
    errors = generator.measure("sum")
    assert errors["float16"][0] == math.inf  # a sum of 300,000 numbers around 0.5 is above 65,504
    assert 0 < errors["bfloat16"][0] < 2**-7
    assert generator.measure("max_pool3d") == dict.fromkeys(("float16", "bfloat16", "float32"), (0.0, 0.0))
    assert {group.kind for group in TABLES["default"]} <= set(generator.WORDS) <= set(CastKind)
    assert torch.exp(torch.ones(1).bfloat16()).dtype is torch.bfloat16
