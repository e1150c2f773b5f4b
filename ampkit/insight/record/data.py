"""The rows of a recording: plain data, which recorder.py fills, and text.py, page.py and advice.py read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from ...dtypes import LOWER_PRECISION

FORWARD, BACKWARD, RECOMPUTED, STEP = "forward", "backward", "recomputed", "step"
#: Functions of rows that are no work of the script's own.
AMPKIT, GRAD_SCALER = "ampkit", "GradScaler"


@dataclass(eq=False)
class CallRow:
    """A function of torch at a line of the script, in one precision: why, and what it took in all iterations.

    ``site`` is the line as ``model.py:31``, ``source`` what stands there, and ``module`` the path of the module that ran, with
    ranges where equal ones are one row (``blocks.0-5.query``). ``phase`` is ``"forward"``, ``"backward"``, ``"recomputed"`` (by
    torch.utils.checkpoint) or ``"step"`` (of an optimizer); a backward operation is at the line of its forward. ``dtypes_in`` are
    those of the arguments before any cast, ``dtypes_out`` those of results. ``reason`` says in words what it computes in and why.

    ``calls`` counts runs of the function's first operator. ``seconds`` are those of its operators alone, ``flops`` floating-point
    operations in matrix products and convolutions (a multiplication and an addition are two), and ``casts``, ``bytes_cast``,
    ``cast_seconds`` what was converted for it (bytes that are written). ``tensor_cores`` is ``"yes"`` or ``"no: ..."`` with the
    reason, and empty for what is no matrix product.
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
    def key(self) -> tuple[Any, ...]:
        """Equal for rows that differ in the module alone."""
        return (
            *(self.file, self.line, self.function, self.phase, self.dtypes_in, self.dtypes_out),
            *(self.reason, self.tensor_cores),
        )


#: What is added up where rows become one.
SUMS = ("calls", "seconds", "flops", "casts", "bytes_cast", "cast_seconds")


@dataclass
class Advice:
    """What to change: ``found`` with its figure, ``change`` the line to write; ``gain`` sorts, a share of the time from 0 to 1."""

    gain: float
    site: str
    found: str
    change: str


@dataclass
class Rows:
    """All rows of a recording and what follows from them; `Record` has the documentation."""

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
        """The 16-bit (or smaller) dtype in which most is computed; None where all is float32."""
        flops, calls = Counter[torch.dtype](), Counter[torch.dtype]()  # where there are no FLOPs, calls decide
        for row in self.calls:
            if row.dtype in LOWER_PRECISION:
                flops[row.dtype] += row.flops
                calls[row.dtype] += row.calls
        return max(calls, key=lambda dtype: (flops[dtype], calls[dtype]), default=None)

    def flops_by_dtype(self) -> dict[torch.dtype, float]:
        """The share of all FLOPs by the dtype they are computed in, the largest first. Empty where there are none."""
        sums = Counter[torch.dtype]()
        for row in self.calls:
            if row.flops and row.dtype is not None:
                sums[row.dtype] += row.flops
        return {dtype: flops / self.flops for dtype, flops in sums.most_common()}

    @property
    def tensor_core_share(self) -> float:
        """The share of all FLOPs that Tensor Cores can run, from 0 to 1; 0 where there are none."""
        able = sum(row.flops for row in self.calls if row.tensor_cores.startswith("yes"))
        return able / self.flops if self.flops else 0.0

    def share_of_time(self, row: CallRow) -> float:
        return row.seconds / self.seconds if self.seconds else 0.0

    def share_of_flops(self, row: CallRow) -> float:
        return row.flops / self.flops if self.flops else 0.0


def add(row: CallRow, other: CallRow) -> None:
    for name in SUMS:
        setattr(row, name, getattr(row, name) + getattr(other, name))
