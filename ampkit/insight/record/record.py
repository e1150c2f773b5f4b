"""`Record`: the result of `recording`, its rows and figures, its text, which fits 100 columns, and its page (page.html.j2)."""

from __future__ import annotations

import json
import linecache
import os
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from ...dtypes import LOWER_PRECISION
from ..words import columns, in_bytes, in_seconds, percent, short

FORWARD, BACKWARD, RECOMPUTED, STEP = "forward", "backward", "recomputed", "step"
#: Functions of rows that are not the script's own work.
AMPKIT, GRAD_SCALER = "ampkit", "GradScaler"
_PHASES = {BACKWARD: "bwd", RECOMPUTED: "again"}
#: The fields that are summed when rows are merged.
SUMS = ("calls", "seconds", "flops", "casts", "bytes_cast", "cast_seconds")
WIDTH = 100
_MOST_ROWS = 25
#: Lines of source shown around each recorded line.
_CONTEXT = 2


@dataclass(eq=False)
class CallRow:
    """A function of torch at a line of the script, in one precision: the reason for it, and its cost in all iterations.

    ``site`` is the line as ``model.py:31``, ``source`` its code, and ``module`` the path of the module that ran, with ranges if
    equal modules share a row (``blocks.0-5.query``). ``phase`` is ``"forward"``, ``"backward"``, ``"recomputed"`` (by
    torch.utils.checkpoint) or ``"step"`` (of an optimizer); a backward operation is at the line of its forward. ``dtypes_in`` are
    the dtypes of arguments before any cast, ``dtypes_out`` those of results. ``reason`` gives the dtype of the computation and why.

    ``calls`` counts runs of the function's first operator. ``seconds`` is the time of its operators alone, ``flops`` the
    floating-point operations of matrix products and convolutions (a multiplication and an addition are two). ``casts``,
    ``bytes_cast`` (bytes written) and ``cast_seconds`` count the casts made for it. ``tensor_cores`` is ``"yes"`` or ``"no: ..."``
    with the reason, and empty if there is no matrix product.
    """

    function: str
    site: str
    source: str
    file: str
    line: int
    module: str
    phase: str
    dtypes_in: tuple[torch.dtype, ...]
    dtypes_out: tuple[torch.dtype, ...]
    dtype: torch.dtype | None
    reason: str
    tensor_cores: str = ""
    calls: int = 0
    seconds: float = 0.0
    flops: int = 0
    casts: int = 0
    bytes_cast: int = 0
    cast_seconds: float = 0.0

    @property
    def label(self) -> str:
        """The function with its phase: ``linear``, or ``linear bwd``."""
        if self.phase == FORWARD or self.function == self.phase:
            return self.function
        return f"{self.function} {_PHASES.get(self.phase, self.phase)}"


def add(row: CallRow, other: CallRow) -> None:
    for name in SUMS:
        setattr(row, name, getattr(row, name) + getattr(other, name))


@dataclass
class Advice:
    """A proposed change: the finding in ``found``, the line to write in ``change``. ``gain``, a share of time (0 to 1), sorts."""

    gain: float
    site: str
    found: str
    change: str


@dataclass
class Record:
    """The result of `recording`, filled when its block ends. ``print`` it, or write it with `to_json` or `to_html`.

    ``calls`` has a `CallRow` per line and function, most time first. ``advice`` has proposed changes, most gain first. ``casts``
    has the weights that were cast, each with the number of casts per iteration and the bytes of a cast. ``seconds`` is the time of
    all operators. ``iterations`` is the number of steps of the optimizer that stepped first (1 if there was none). ``notes`` are
    remarks on the figures.
    """

    calls: list[CallRow] = field(default_factory=list)
    casts: list[tuple[str, float, int]] = field(default_factory=list)
    advice: list[Advice] = field(default_factory=list)
    iterations: int = 0
    about: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(row.seconds for row in self.calls)

    @property
    def flops(self) -> int:
        return sum(row.flops for row in self.calls)

    @property
    def lower_precision(self) -> torch.dtype | None:
        """The 16-bit (or smaller) dtype with the most FLOPs; None if no row computes in lower precision."""
        flops, calls = Counter[torch.dtype](), Counter[torch.dtype]()  # without FLOPs, calls decide
        for row in self.calls:
            if row.dtype in LOWER_PRECISION:
                flops[row.dtype] += row.flops
                calls[row.dtype] += row.calls
        return max(calls, key=lambda dtype: (flops[dtype], calls[dtype]), default=None)

    def flops_by_dtype(self) -> dict[torch.dtype, float]:
        """Return the share of all FLOPs by dtype of the computation, the largest first; empty if there are no FLOPs."""
        sums = Counter[torch.dtype]()
        for row in self.calls:
            if row.flops and row.dtype is not None:
                sums[row.dtype] += row.flops
        return {dtype: flops / self.flops for dtype, flops in sums.most_common()}

    @property
    def tensor_core_share(self) -> float:
        """The share of all FLOPs that Tensor Cores can run, from 0 to 1; 0 if there are no FLOPs."""
        able = sum(row.flops for row in self.calls if row.tensor_cores.startswith("yes"))
        return able / self.flops if self.flops else 0.0

    def share_of_time(self, row: CallRow) -> float:
        return row.seconds / self.seconds if self.seconds else 0.0

    def share_of_flops(self, row: CallRow) -> float:
        return row.flops / self.flops if self.flops else 0.0

    def to_json(self, path: str | Path) -> None:
        """Write all rows as JSON: the fields, files without their folders, and dtypes as ``"bfloat16"``."""
        fields = asdict(replace(self, calls=[replace(row, file=os.path.basename(row.file)) for row in self.calls]))
        Path(path).write_text(json.dumps(fields, indent=1, default=short) + "\n")

    def to_html(self, path: str | Path) -> None:
        """Write a page that needs no network: the source with dtypes and shares of time, and the advice. It needs jinja2."""
        Path(path).write_text(_render(self), encoding="utf-8")

    def __str__(self) -> str:
        if not self.calls:
            return "nothing recorded: the block has not ended, or ran no function of torch"
        lines = [part for line in _overview(self) for part in textwrap.wrap(line, WIDTH, subsequent_indent="  ")]
        parts = [lines, _table(self), _advice(self)]
        return "\n\n".join("\n".join(part) for part in parts if part)


def _overview(record: Record) -> list[str]:
    shares = ", ".join(f"{share:.0%} {short(dtype)}" for dtype, share in record.flops_by_dtype().items())
    plural = "s" * (record.iterations != 1)
    return [
        record.about,
        f"{record.iterations} iteration{plural}: {in_seconds(record.seconds / record.iterations)} in operators each",
        *[f"FLOPs: {shares}; Tensor Cores can run {record.tensor_core_share:.0%}"] * bool(shares),
        *(f"note: {note}" for note in record.notes),
    ]


def _table(record: Record) -> list[str]:
    calls = _by_line(record.calls)
    rows = [("time", "FLOPs", "cast", "line", "function", "in -> out", "why")]
    for row in calls[:_MOST_ROWS]:
        flops = f"{record.share_of_flops(row):.0%}" if row.flops else ""
        cast = in_bytes(row.bytes_cast / record.iterations) if row.bytes_cast else ""
        precision = f"{_dtypes(row.dtypes_in)} -> {_dtypes(row.dtypes_out)}".strip("-> ")
        figures = f"{record.share_of_time(row):.0%}", flops, cast
        rows.append((*figures, _line(row.site), _cut(row.label, 19), precision, _why(row)))
    lines = [_cut(line, WIDTH) for line in columns(rows, right=(0, 1, 2))]
    if len(calls) > _MOST_ROWS:
        lines.append(f"... and {len(calls) - _MOST_ROWS} more rows: record.calls has all, and their modules")
    return lines


def _by_line(calls: list[CallRow]) -> list[CallRow]:
    """Merge rows that differ only in the module, and sort them, most time first."""
    rows: dict[Any, CallRow] = {}
    for row in calls:
        blank = replace(row, module="", **dict.fromkeys(SUMS, 0))
        add(rows.setdefault(tuple(vars(blank).values()), blank), row)
    return sorted(rows.values(), key=lambda row: -row.seconds)


def _advice(record: Record) -> list[str]:
    lines = []
    for number, advice in enumerate(record.advice, start=1):
        where = f"{advice.site}: " if advice.site else ""
        lines += textwrap.wrap(f"{number}. {where}{advice.found}", WIDTH, subsequent_indent="   ")
        lines += textwrap.wrap(advice.change, WIDTH, initial_indent="   -> ", subsequent_indent="      ")
    return lines


def _dtypes(of: tuple[torch.dtype, ...]) -> str:
    """Format dtypes as ``bf16, fp32``."""
    return ", ".join(re.sub("^b?float", lambda match: "bf" if match[0] == "bfloat" else "fp", short(x)) for x in of)


def _why(row: CallRow) -> str:
    """Return the reason, without the dtype if it is that of the result, and without "of the tables" if a row is named."""
    dtype, _, cause = row.reason.removesuffix(" of the tables").partition(": ")
    return cause if row.dtypes_out and cause and dtype == short(row.dtypes_out[0]) else row.reason


def _line(site: str) -> str:
    file, colon, number = site.rpartition(":")
    return _cut(file, 18 - len(number)) + colon + number if colon else site


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


# The page


def _render(record: Record) -> str:
    """Render a `Record` as HTML. Raises ImportError if jinja2 is missing."""
    try:
        import jinja2
    except ImportError as error:
        raise ImportError("to_html makes its page with jinja2, which is not installed: pip install jinja2") from error
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters.update(percent=percent, bytes=in_bytes)
    template = resources.files(__package__).joinpath("page.html.j2").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        record=record, overview=_overview(record), files=list(_files(record))
    )


def _files(record: Record) -> Iterator[dict[str, Any]]:
    files: dict[str, dict[int, list[CallRow]]] = {}
    for row in record.calls:
        if row.line:
            files.setdefault(row.file, {}).setdefault(row.line, []).append(row)
    shares = {path: sum(record.share_of_time(row) for rows in files[path].values() for row in rows) for path in files}
    for path in sorted(files, key=lambda path: -shares[path]):
        lines, source, stretches = files[path], linecache.getlines(path), list[list[dict[str, Any]]]()
        for number, text in enumerate(map(str.rstrip, source), start=1):
            if not any(abs(number - line) <= (_CONTEXT if text else 0) for line in lines):
                continue
            line = _line_of(record, number, text, lines.get(number, []))
            if stretches and stretches[-1][-1]["number"] == number - 1:
                stretches[-1].append(line)
            else:
                stretches.append([line])
        if stretches:
            yield {"name": os.path.basename(path), "share": shares[path], "stretches": stretches}


def _line_of(record: Record, number: int, text: str, rows: list[CallRow]) -> dict[str, Any]:
    """Return a line of source with its rows. Its remarks say more than the dtype, or which sizes keep Tensor Cores from running."""
    ordinary = "as its forward", "as given", "numbers"
    remarks = [row.reason for row in rows if not row.reason.endswith(ordinary)]
    remarks += [row.tensor_cores.removeprefix("no: ") for row in rows if "no multiple of" in row.tensor_cores]
    dtypes = dict.fromkeys(short(row.dtype) for row in rows if row.dtype is not None)
    share, indent = sum(map(record.share_of_time, rows)), len(text) - len(text.lstrip())
    about = {"dtypes": list(dtypes), "remarks": list(dict.fromkeys(remarks)), "share": share, "indent": indent}
    return {"number": number, "text": text, "rows": rows, **about}
