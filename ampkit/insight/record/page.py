"""A record as one HTML page that needs no network: page.html.j2 with the figures that it shows, charts as inline SVG.

The source is read from the script's files as they are when the page is written.
"""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from ..words import in_bytes, in_seconds, percent, short
from .data import CallRow, Rows
from .text import dtypes, function_of

#: Lines of source around each that was recorded.
_CONTEXT = 2


@dataclass
class _Line:
    """A line of source, with the rows that were recorded there, most time first."""

    number: int
    text: str
    share: float = 0.0
    rows: list[CallRow] = field(default_factory=list)

    @property
    def indent(self) -> int:
        return len(self.text) - len(self.text.lstrip())

    @property
    def dtypes(self) -> list[str]:
        return list(dict.fromkeys(short(row.dtype) for row in self.rows if row.dtype is not None))

    @property
    def remarks(self) -> list[str]:
        """Reasons that say more than the dtype does, and sizes that keep Tensor Cores out."""
        reasons = [
            row.reason for row in self.rows if not row.reason.endswith(("as its forward", "as given", "numbers"))
        ]
        sizes = [row.tensor_cores.removeprefix("no: ") for row in self.rows if "no multiple of" in row.tensor_cores]
        return list(dict.fromkeys(reasons + sizes))


def render(record: Rows) -> str:
    """The page. Raises ImportError where jinja2 is missing."""
    try:
        import jinja2
    except ImportError as error:
        raise ImportError("to_html makes its page with jinja2, which is not installed: pip install jinja2") from error
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters.update(percent=percent, bytes=in_bytes, dtype=short, dtypes=dtypes, function=function_of)
    template = resources.files(__package__).joinpath("page.html.j2").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        record=record,
        tiles=list(_tiles(record)),
        bars=list(_bars(record)),
        files=list(_files(record)),
    )


def _tiles(record: Rows) -> Iterator[tuple[str, str, str]]:
    """Figure, name and remark."""
    yield in_seconds(record.seconds / record.iterations), "in operators, per iteration", f"{record.iterations} recorded"
    if record.flops:
        yield percent(record.tensor_core_share), "of FLOPs fit Tensor Cores", "by shapes and dtypes"
    cast = sum(row.bytes_cast for row in record.calls) / record.iterations
    yield in_bytes(cast), "cast, per iteration", ""


def _bars(record: Rows) -> Iterator[tuple[str, list[tuple[str, float, str]]]]:
    """Stacked bars: a title, and the parts with dtype, share and words."""
    if record.flops:
        parts = [(short(dtype), share, percent(share)) for dtype, share in record.flops_by_dtype().items()]
        yield f"FLOPs by dtype: {record.flops / record.iterations / 1e9:.3g} G an iteration", parts
    times: dict[str, float] = {}
    for row in record.calls:
        name = short(row.dtype) if row.dtype is not None else "no floating-point numbers"
        times[name] = times.get(name, 0.0) + record.share_of_time(row)
    ordered = sorted(times.items(), key=lambda item: -item[1])
    yield "Time by dtype", [(name, share, percent(share)) for name, share in ordered]


def _files(record: Rows) -> Iterator[dict[str, Any]]:
    """Files of the script by their time, as stretches of lines."""
    files: dict[str, dict[int, list[CallRow]]] = {}
    for row in record.calls:
        if row.line:
            files.setdefault(row.file, {}).setdefault(row.line, []).append(row)
    for path, lines in sorted(
        files.items(), key=lambda item: -sum(row.seconds for rows in item[1].values() for row in rows)
    ):
        source = [line.rstrip("\n") for line in linecache.getlines(path)]
        shown = sorted(
            {n for line in lines for n in range(line - _CONTEXT, line + _CONTEXT + 1) if 0 < n <= len(source)}
        )
        stretches: list[list[_Line]] = []
        for number in shown:
            rows = lines.get(number, [])
            line = _Line(number, source[number - 1], sum(map(record.share_of_time, rows)), rows)
            if stretches and stretches[-1][-1].number == number - 1:
                stretches[-1].append(line)
            else:
                stretches.append([line])
        for stretch in stretches:  # no blank line at either end
            while not stretch[0].text.strip():
                del stretch[0]
            while not stretch[-1].text.strip():
                del stretch[-1]
        if stretches:
            share = sum(line.share for stretch in stretches for line in stretch)
            yield {"name": os.path.basename(path), "share": share, "stretches": stretches}
