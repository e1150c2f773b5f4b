"""`Record`: what `recording` gives, and the forms in which it is read: text, JSON, a page, one for several processes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..explain import short
from .advice import advise
from .data import SUMS, CallRow, Rows, TensorRow, add
from .page import render
from .text import in_words


@dataclass
class Record(Rows):
    """What `recording` gives: rows, when its block has ended. ``print`` it, or write it with `to_html` and `to_json`.

    ``calls`` has a `CallRow` per line and function, most time first; ``tensors`` a `TensorRow` by name; ``scale`` a `StepRow` per
    step; ``memory`` the bytes that tensors took at the peak, by kind; ``advice`` what to change, most gain first. ``seconds`` is
    the time of all operators, ``iterations`` the number of steps of the optimizer that stepped first (1 where there was none),
    ``ranks`` of how many processes the record tells, and ``notes`` what is to be known of the figures.
    """

    def merge(self, others: Iterable[Record]) -> Record:
        """One record of several processes: calls and casts are added up, shares are means, maxima and peaks the largest of any.

        ``scale`` is that of this record. Send records with ``torch.distributed.gather_object``; they pickle.
        """
        records = [self, *others]
        calls: dict[tuple[Any, ...], CallRow] = {}
        for row in (row for one in records for row in one.calls):
            known = calls.setdefault(row.key, replace(row, **dict.fromkeys(SUMS, 0)))
            add(known, row)
        names = dict.fromkeys(name for one in records for name in one.tensors)
        merged = replace(
            self,
            calls=sorted(calls.values(), key=lambda row: -row.seconds),
            tensors={name: _joined([one.tensors[name] for one in records if name in one.tensors]) for name in names},
            memory=max((one.memory for one in records), key=lambda memory: sum(memory.values())),
            ranks=sum(one.ranks for one in records),
            notes=list(dict.fromkeys(note for one in records for note in one.notes)),
        )
        merged.advice = advise(merged)
        return merged

    def to_json(self, path: str | Path) -> None:
        """Write all rows as JSON: the fields, files without their folders, dtypes as ``"bfloat16"``, NaN and inf as strings."""
        fields = asdict(replace(self, calls=[replace(row, file=os.path.basename(row.file)) for row in self.calls]))
        Path(path).write_text(json.dumps(_plain(fields), indent=1, allow_nan=False) + "\n")

    def to_html(self, path: str | Path) -> None:
        """Write one page that needs no network and no server: overview, source with figures at each line, tables that sort.

        Raises ImportError where jinja2 is missing, with the command that installs it.
        """
        Path(path).write_text(render(self), encoding="utf-8")

    def __str__(self) -> str:
        return in_words(self)


def _joined(rows: list[TensorRow]) -> TensorRow:
    def mean(name: str) -> float | None:
        known = [value for row in rows if (value := getattr(row, name)) is not None]
        return sum(known) / len(known) if known else None

    shares = ("underflow", "lost_updates", "lost_without_masters")
    return replace(
        rows[0],
        absmax=max((row.absmax for row in rows), key=_nan_first),
        grad_absmax=max((row.grad_absmax for row in rows if row.grad_absmax == row.grad_absmax), default=math.nan),
        **{name: mean(name) for name in shares},
    )


def _nan_first(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return short(value)
    if isinstance(value, float) and value - value != 0:
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value
