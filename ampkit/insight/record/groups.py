"""The state of a running recording: a `Group` for each function at a line, whose calls become rows, and `Origins` of tensors."""

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

#: The key of a row in a group: dtypes of arguments, of the result and of the computation, and the verdict on Tensor Cores.
Precision = tuple[frozenset[torch.dtype], torch.dtype | None, torch.dtype | None, str]


@dataclass(eq=False)
class Group:
    """A function at a line, in one phase, in modules of one kind. ``waiting`` has the casts, and their time, for the next call."""

    site: Site | None
    function: str
    phase: str
    module: str = ""  # of the latest call
    #: Paths of modules, by row.
    paths: defaultdict[Any, set[str]] = field(default_factory=lambda: defaultdict(set))
    rows: dict[Precision, CallRow] = field(default_factory=dict)
    last: CallRow | None = None
    lead: Any = None  # the operator (in backward the autograd node) that counts calls
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
            dtypes_in=tuple(sorted(dtypes_in, key=lambda dtype_in: (-dtype_in.itemsize, str(dtype_in)))),
            dtypes_out=(out,) if out is not None else (),
            dtype=dtype,
            reason="no floating-point numbers",
            tensor_cores=tensor_cores,
        )


def rows_of(groups: Iterable[Group]) -> Iterator[CallRow]:
    """Yield the rows of all groups; casts that still wait join a row of the same line, or get a row of their own."""
    by_line: defaultdict[Any, list[CallRow]] = defaultdict(list)
    for group in sorted(groups, key=lambda x: x.last is None):
        line_rows = by_line[group.site, group.phase]
        if (row := group.last or next(iter(line_rows), None)) is not None:
            group.hand_over(row)
        else:  # a line that only casts, or computes with integers
            row = group.waiting
            row.calls, row.cast_seconds = row.casts, row.seconds
            row.reason = "a cast of the script's" if row.casts else row.reason
        for merged in _folded(group.rows.values() or [group.waiting]):
            merged.module = collapsed(group.paths[merged])
            line_rows.append(merged)
            yield merged


def _folded(rows: Iterable[CallRow]) -> Iterator[CallRow]:
    """Merge rows without matrix products, such as the copy before a batched product, into the row with the product."""
    rows = list(rows)
    products = [row for row in rows if row.flops]
    for row in products:  # further products of the same calls: a backward has two
        row.calls = row.calls or max(x.calls for x in rows)
    for row in rows:
        same = (x for x in products if x is not row and (x.dtype, x.reason) == (row.dtype, row.reason))
        product = None if row.flops else next(same, None)
        if product is None:
            yield row
        else:
            calls = product.calls
            add(product, row)
            product.calls = calls


class Origin:
    """The origin of the tensor that was made last in a piece of memory.

    ``name`` is that of a parameter. ``row`` is the `CallRow` that made it. A cast has the dtype before the cast (``source``), the
    origin of the cast ``weight`` (None for an activation), and the ``group`` of the call that needed it. ``asked`` describes a cast
    that the script itself makes.
    """

    __slots__ = ("asked", "group", "name", "row", "source", "weight")

    def __init__(self) -> None:
        self.name = self.row = self.source = self.weight = self.group = self.asked = None


class Origins:
    """A map from the memory of live tensors to their `Origin`."""

    def __init__(self) -> None:
        self._by_memory = WeakIdKeyDictionary()

    def of(self, tensor: torch.Tensor) -> Origin:
        try:
            memory = local(tensor).untyped_storage()
        except (NotImplementedError, RuntimeError, ValueError):  # a sparse, wrapping or lazy tensor
            return Origin()
        origin: Origin | None = self._by_memory.get(memory)
        if origin is None:
            origin = self._by_memory[memory] = Origin()
        return origin
