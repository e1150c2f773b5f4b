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
from .data import SUMS, CallRow, add

#: What a function was given, made and computed in, and what Tensor Cores say of it: a row of its own each.
Precision = tuple[frozenset[torch.dtype], torch.dtype | None, torch.dtype | None, str]


@dataclass(eq=False)
class Group:
    """A function at a line, in one phase, in modules of one kind. Its casts, and their time, are ``waiting`` for the next call."""

    site: Site | None
    function: str
    phase: str
    module: str = ""  # of the latest call
    #: Of modules, by the row.
    paths: defaultdict[Any, set[str]] = field(default_factory=lambda: defaultdict(set))
    rows: dict[Precision, CallRow] = field(default_factory=dict)
    last: CallRow | None = None
    lead: Any = None  # the operator, or in backward autograd's node, that counts calls
    number: int = -1  # of the last such node
    has_product: bool = False

    def __post_init__(self) -> None:
        self.waiting = self.new_row((frozenset(), None, None, ""))

    def hand_over(self, row: CallRow) -> None:
        if self.waiting.seconds or self.waiting.casts:
            self.waiting.cast_seconds = self.waiting.seconds
            add(row, self.waiting)
            vars(self.waiting).update(dict.fromkeys(SUMS, 0))

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
        if (row := group.last or next(iter(at), None)) is not None:
            group.hand_over(row)
        else:  # a line that does nothing but convert, or computes with integers
            row = group.waiting
            row.calls, row.cast_seconds = row.casts, row.seconds
            row.reason = "a cast of the script's" if row.casts else row.reason
        for one in _folded(group.rows.values() or [group.waiting]):
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
