"""`Record`: the result of `recording`."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..words import short
from .data import Rows
from .page import render
from .text import in_words


@dataclass
class Record(Rows):
    """The result of `recording`, filled when its block ends. ``print`` it, or write it with `to_json` or `to_html`.

    ``calls`` has a `CallRow` per line and function, most time first. ``advice`` has proposed changes, most gain first. ``casts``
    has the weights that were cast, each with the number of casts per iteration and the bytes of a cast. ``seconds`` is the time of
    all operators. ``iterations`` is the number of steps of the optimizer that stepped first (1 if there was none). ``notes`` are
    remarks on the figures.
    """

    def to_json(self, path: str | Path) -> None:
        """Write all rows as JSON: the fields, files without their folders, and dtypes as ``"bfloat16"``."""
        fields = asdict(replace(self, calls=[replace(row, file=os.path.basename(row.file)) for row in self.calls]))
        Path(path).write_text(json.dumps(fields, indent=1, default=short) + "\n")

    def to_html(self, path: str | Path) -> None:
        """Write a page that needs no network: the source with dtypes and shares of time, and the advice. It needs jinja2."""
        Path(path).write_text(render(self), encoding="utf-8")

    def __str__(self) -> str:
        return in_words(self)
