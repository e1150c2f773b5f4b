"""What all reports print with: figures, dtypes and names in words, and tables."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence

import torch

_NUMBER = re.compile(r"\d+")


def percent(share: float | None) -> str:
    """``36%``, ``3.6%``, ``0.36%``, ``<0.01%``; nothing for None and NaN."""
    if share is None or share != share:
        return ""
    if 0 < share < 0.0001:
        return "<0.01%"
    return f"{100 * share:.2g}%" if share < 0.995 else f"{share:.0%}"


def in_bytes(size: float) -> str:
    """``1.2 MB``"""
    power = next((power for power in (0, 1, 2) if abs(size) < 999.5 * 1000**power), 3)
    unit, size = ("B", "kB", "MB", "GB")[power], size / 1000**power
    return f"{size:.0f} {unit}" if unit == "B" or size >= 99.5 else f"{size:.1f} {unit}"


def in_seconds(seconds: float) -> str:
    """``12.3 ms``"""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def pattern(path: str) -> str:
    """``blocks.#.query``"""
    return _NUMBER.sub("#", path)


def collapsed(paths: set[str]) -> str:
    """Paths that differ in numbers alone, as one: ``blocks.0-5.query``."""
    columns = zip(*(map(int, _NUMBER.findall(path)) for path in paths))
    texts = iter([ranges(set(column)) for column in columns])
    return re.sub("#", lambda _: next(texts), pattern(next(iter(paths))))


def ranges(numbers: Iterable[int]) -> str:
    """``0-3`` of 0, 1, 2 and 3; ``0,2`` of 0 and 2."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Lines in which the cells of each column stand below one another."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
