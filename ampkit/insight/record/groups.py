"""What a recording keeps while it runs: a `Group` for a function at a line, whose calls become rows, and `Origins` of tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ...sharding import local
from ..sites import Site
from ..words import collapsed
from .data import CallRow, add

#: What a function was given, made and computed in, and what Tensor Cores say of it: a row of its own each.
Precision = tuple[frozenset[torch.dtype], torch.dtype | None, torch.dtype | None, str]


@dataclass(eq=False)
class Group:
    """A function at a line, in one phase, in modules of one kind. Casts and seconds wait for the next call."""

    site: Site | None
    function: str
    phase: str
    module: str = ""  # of the latest call
    #: Of modules, by the row, or by this group where no row has them.
    paths: defaultdict[Any, set[str]] = field(default_factory=lambda: defaultdict(set))
    rows: dict[Precision, CallRow] = field(default_factory=dict)
    last: CallRow | None = None
    lead: Any = None  # the operator, or in backward autograd's node, that counts calls
    number: int = -1  # of the last such node
    has_product: bool = False
    casts: int = 0
    bytes_cast: int = 0
    seconds: float = 0.0

    def hand_over(self, row: CallRow) -> None:
        row.casts += self.casts
        row.bytes_cast += self.bytes_cast
        row.seconds += self.seconds
        row.cast_seconds += self.seconds
        self.casts = self.bytes_cast = 0
        self.seconds = 0.0

    def new_row(self, precision: Precision) -> CallRow:
        site, (dtypes_in, out, dtype, tensor_cores) = self.site, precision
        return CallRow(
            function=self.function.rpartition(".")[2].strip("_") or self.function,
            site=str(site or "(no line)"),
            source=site.source if site else "",
            file=site.file if site else "",
            line=site.line if site else 0,
            module="",
            phase=self.phase,
            dtypes_in=tuple(sorted(dtypes_in, key=lambda one: (-one.itemsize, str(one)))),
            dtypes_out=(out,) if out is not None else (),
            dtype=dtype,
            reason="no floating-point numbers",
            tensor_cores=tensor_cores,
        )


def rows_of(groups: Iterable[Group]) -> Iterator[CallRow]:
    """Rows of all groups; what still waits goes to a row of the same line, or to one of its own."""
    by_line: defaultdict[Any, list[CallRow]] = defaultdict(list)
    for group in sorted(groups, key=lambda one: one.last is None):
        at = by_line[group.site, group.phase]
        row = group.last or next(iter(at), None)
        if row is None:  # a line that does nothing but convert, or computes with integers
            precision: Precision = frozenset(), None, None, ""
            row = group.rows[precision] = group.new_row(precision)
            row.calls, group.paths[row] = group.casts, group.paths[group]
            row.reason = "a cast of the script's" if group.casts else row.reason
        group.hand_over(row)
        for one in _folded(group.rows.values()):
            one.module = collapsed(group.paths[one])
            at.append(one)
            yield one


def _folded(rows: Iterable[CallRow]) -> Iterator[CallRow]:
    """Rows without products, such as the copy in front of a batched one, as a part of the row that has them."""
    rows = list(rows)
    products = [row for row in rows if row.flops]
    for row in products:  # another product of the same calls, as backward has two
        row.calls = row.calls or max(one.calls for one in rows)
    for row in rows:
        same = (one for one in products if one is not row and (one.dtype, one.reason) == (row.dtype, row.reason))
        product = None if row.flops else next(same, None)
        if product is None:
            yield row
        else:
            calls = product.calls
            add(product, row)
            product.calls = calls


class Origin:
    """What is known of the tensor that was made in a piece of memory last.

    ``name`` is that of a parameter. ``row`` is the `CallRow` that made it. A cast has the dtype that it was cast from
    (``source``), the origin of the ``weight`` it is the cast of, None for an activation, and the ``group`` of the call that it was
    made for; one that the script makes is named by ``asked``.
    """

    __slots__ = ("asked", "group", "name", "row", "source", "weight")

    def __init__(self) -> None:
        self.name = self.row = self.source = self.weight = self.group = self.asked = None


class Origins:
    """Origins of tensors that live, by their memory."""

    def __init__(self) -> None:
        self._of_memory = WeakIdKeyDictionary()

    def of(self, tensor: torch.Tensor) -> Origin:
        try:
            memory = local(tensor).untyped_storage()
        except (NotImplementedError, RuntimeError, ValueError):  # sparse, a wrapper of another one, or lazy
            return Origin()
        found: Origin | None = self._of_memory.get(memory)
        if found is None:
            found = self._of_memory[memory] = Origin()
        return found
