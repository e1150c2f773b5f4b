"""Functions that format figures, dtypes, names and tables for all reports."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence

import torch

_NUMBER = re.compile(r"\d+")


def percent(share: float | None) -> str:
    """Format a share as ``36%``, ``3.6%``, ``0.36%`` or ``<0.01%``; empty for None and NaN."""
    if share is None or share != share:
        return ""
    if 0 < share < 0.0001:
        return "<0.01%"
    return f"{100 * share:.2g}%" if share < 0.995 else f"{share:.0%}"


def in_bytes(size: float) -> str:
    """Format a size as ``1.2 MB``."""
    power = next((power for power in (0, 1, 2) if abs(size) < 999.5 * 1000**power), 3)
    unit, size = ("B", "kB", "MB", "GB")[power], size / 1000**power
    return f"{size:.0f} {unit}" if unit == "B" or size >= 99.5 else f"{size:.1f} {unit}"


def in_seconds(seconds: float) -> str:
    """Format a time as ``12.3 ms``."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def pattern(path: str) -> str:
    """Replace numbers in a path: ``blocks.#.query``."""
    return _NUMBER.sub("#", path)


def collapsed(paths: set[str]) -> str:
    """Merge paths that differ only in numbers: ``blocks.0-5.query``."""
    columns = zip(*(map(int, _NUMBER.findall(path)) for path in paths))
    texts = iter([ranges(set(column)) for column in columns])
    return re.sub("#", lambda _: next(texts), pattern(next(iter(paths))))


def ranges(numbers: Iterable[int]) -> str:
    """Format numbers as ranges: ``0-3`` for 0, 1, 2 and 3; ``0,2`` for 0 and 2."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Format rows as lines with aligned columns; columns in ``right`` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
