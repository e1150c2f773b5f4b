"""A record as text that fits 100 columns."""

from __future__ import annotations

import re
import textwrap
from dataclasses import replace
from typing import Any

import torch

from ..words import columns, in_bytes, in_seconds, short
from .data import BACKWARD, FORWARD, RECOMPUTED, SUMS, CallRow, Rows, add

WIDTH = 100
_MOST_ROWS = 25
_PHASES = {BACKWARD: "bwd", RECOMPUTED: "again"}


def in_words(record: Rows) -> str:
    if not record.calls:
        return "nothing recorded: the block has not ended, or ran no function of torch"
    lines = [part for line in overview(record) for part in textwrap.wrap(line, WIDTH, subsequent_indent="  ")]
    parts = [lines, _calls(record), _advice(record)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def overview(record: Rows) -> list[str]:
    shares = ", ".join(f"{share:.0%} {short(dtype)}" for dtype, share in record.flops_by_dtype().items())
    plural = "s" * (record.iterations != 1)
    return [
        record.about,
        f"{record.iterations} iteration{plural}: {in_seconds(record.seconds / record.iterations)} in operators each",
        *[f"FLOPs: {shares}; Tensor Cores can run {record.tensor_core_share:.0%}"] * bool(shares),
        *(f"note: {note}" for note in record.notes),
    ]


def _calls(record: Rows) -> list[str]:
    calls = by_line(record)
    shown = calls[:_MOST_ROWS]
    rows = [("time", "FLOPs", "cast", "line", "function", "in -> out", "why")]
    for row in shown:
        flops = f"{record.share_of_flops(row):.0%}" if row.flops else ""
        cast = in_bytes(row.bytes_cast / record.iterations) if row.bytes_cast else ""
        precision = f"{dtypes(row.dtypes_in)} -> {dtypes(row.dtypes_out)}".strip("-> ")
        figures = f"{record.share_of_time(row):.0%}", flops, cast
        rows.append((*figures, _line(row.site), _cut(function_of(row), 19), precision, why(row)))
    lines = [_cut(line, WIDTH) for line in columns(rows, right=(0, 1, 2))]
    if len(shown) < len(calls):
        lines.append(f"... and {len(calls) - len(shown)} more rows: record.calls has all, and their modules")
    return lines


def _advice(record: Rows) -> list[str]:
    lines = []
    for number, advice in enumerate(record.advice, start=1):
        where = f"{advice.site}: " if advice.site else ""
        lines += textwrap.wrap(f"{number}. {where}{advice.found}", WIDTH, subsequent_indent="   ")
        lines += textwrap.wrap(advice.change, WIDTH, initial_indent="   -> ", subsequent_indent="      ")
    return lines


def function_of(row: CallRow) -> str:
    """Return the function with its phase: ``linear``, or ``linear bwd``."""
    if row.phase == FORWARD or row.function == row.phase:
        return row.function
    return f"{row.function} {_PHASES.get(row.phase, row.phase)}"


def by_line(record: Rows) -> list[CallRow]:
    """Merge rows that differ only in the module, and sort them, most time first."""
    rows: dict[Any, CallRow] = {}
    for row in record.calls:
        known = rows.setdefault(row.key, replace(row, module="", **dict.fromkeys(SUMS, 0)))
        add(known, row)
    return sorted(rows.values(), key=lambda row: -row.seconds)


def dtypes(of: tuple[torch.dtype, ...]) -> str:
    """Format dtypes as ``bf16, fp32``."""
    return ", ".join(re.sub("^b?float", lambda match: "bf" if match[0] == "bfloat" else "fp", short(x)) for x in of)


def why(row: CallRow) -> str:
    """Return the reason, without the dtype if it is that of the result, and without "of the tables" if a row is named."""
    dtype, _, cause = row.reason.removesuffix(" of the tables").partition(": ")
    return cause if row.dtypes_out and cause and dtype == short(row.dtypes_out[0]) else row.reason


def _line(site: str) -> str:
    file, colon, number = site.rpartition(":")
    return _cut(file, 18 - len(number)) + colon + number if colon else site


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
