"""Bytes that kernels read and write, counted from PTX, against the need of their algorithms and the numbers of the page."""

import pytest
from helpers import ROOT

from ptx import launching, traffic

pytestmark = pytest.mark.ptx


def row_of_page(name: str) -> list[str]:
    rows = (ROOT / "docs" / "benchmarks.md").read_text().splitlines()
    return next([cell.strip() for cell in row.split("|")[1:-1]] for row in rows if row.startswith(f"| {name} |"))


@pytest.mark.parametrize("name", traffic.CASES)
def test_a_kernel_moves_the_bytes_that_it_needs(name):
    make, reads, writes = traffic.CASES[name]
    counted = traffic.measured(make())
    assert 1 <= counted.ratio(reads + writes) <= 1.05
    assert counted.read.bytes / traffic.ELEMENTS <= 1.05 * reads
    assert counted.written.bytes / traffic.ELEMENTS <= 1.05 * writes + 0.01
    page = row_of_page(name)
    told = [float(number) for number in page[2].split(" + ")]
    moved = [side.bytes / traffic.ELEMENTS for side in (counted.read, counted.written)]
    # Where memory begins may move the last digit.
    assert moved == pytest.approx(told, abs=0.002), "run python -m ptx.traffic"
    assert page[1] == f"{reads} + {writes}", "run python -m ptx.traffic"
    assert page[4:6] == [traffic.of_sectors(x) for x in (counted.read, counted.written)], "run python -m ptx.traffic"


def test_a_tensor_that_begins_elsewhere_is_moved_once_too():
    """More requests of fewer bytes move it, whose sectors meet in the cache."""
    x, out = traffic.numbers(traffic.F32), traffic.numbers(traffic.F32)
    found = traffic.measured(lambda: traffic.kernels.multi_tensor_scale([x[0][1:]], [out[0][1:]], 0.5))
    assert found.read.bytes == found.written.bytes == 4 * (traffic.ELEMENTS - 1)
    assert found.read.full == 0


def test_sectors_are_counted_of_each_warp():
    """Counts by hand: a warp reads 4 bytes a lane, in 4 sectors; another every second of 8, a lane of a third the same again."""
    address = [*range(0, 128, 4), *range(4096, 4096 + 256, 8), 4096]
    access = launching.Access(
        "read", traffic.np.array(address, "uint64"), 4, traffic.np.arange(65), None, None, None, None, 0
    )
    assert traffic.count(access) == (128 + 128 + 4, 4 + 8 + 1, 4)
