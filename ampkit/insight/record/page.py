"""A record as an HTML page that needs no network: page.html.j2 with the current source, and the dtypes of its lines."""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from ..words import in_bytes, percent, short
from .data import CallRow

#: Lines of source shown around each recorded line.
_CONTEXT = 2


@dataclass
class _Line:
    """A line of source, with the rows recorded there, most time first."""

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
        """The reasons that say more than the dtype, and the sizes that keep Tensor Cores from running."""
        ordinary = "as its forward", "as given", "numbers"
        reasons = [row.reason for row in self.rows if not row.reason.endswith(ordinary)]
        sizes = [row.tensor_cores.removeprefix("no: ") for row in self.rows if "no multiple of" in row.tensor_cores]
        return list(dict.fromkeys(reasons + sizes))


def render(record: Any, overview: list[str]) -> str:
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
    return environment.from_string(template).render(record=record, overview=overview, files=list(_files(record)))


def _files(record: Any) -> Iterator[dict[str, Any]]:
    files: dict[str, dict[int, list[CallRow]]] = {}
    for row in record.calls:
        if row.line:
            files.setdefault(row.file, {}).setdefault(row.line, []).append(row)
    shares = {path: sum(record.share_of_time(row) for rows in files[path].values() for row in rows) for path in files}
    for path in sorted(files, key=lambda path: -shares[path]):
        lines, source, stretches = files[path], linecache.getlines(path), list[list[_Line]]()
        for number, text in enumerate(map(str.rstrip, source), start=1):
            if not any(abs(number - line) <= (_CONTEXT if text else 0) for line in lines):
                continue
            rows = lines.get(number, [])
            line = _Line(number, text, sum(map(record.share_of_time, rows)), rows)
            if stretches and stretches[-1][-1].number == number - 1:
                stretches[-1].append(line)
            else:
                stretches.append([line])
        if stretches:
            yield {"name": os.path.basename(path), "share": shares[path], "stretches": stretches}
