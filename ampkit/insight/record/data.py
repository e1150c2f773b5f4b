"""The rows of a recording: plain data that recorder.py fills, and text.py, page.py and advice.py read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from ...dtypes import LOWER_PRECISION

FORWARD, BACKWARD, RECOMPUTED, STEP = "forward", "backward", "recomputed", "step"
#: Functions of rows that are not the script's own work.
AMPKIT, GRAD_SCALER = "ampkit", "GradScaler"


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
    def key(self) -> tuple[Any, ...]:
        """A key that is equal for rows that differ only in the module."""
        return (
            *(self.file, self.line, self.function, self.phase, self.dtypes_in, self.dtypes_out),
            *(self.reason, self.tensor_cores),
        )


#: The fields that are summed when rows are merged.
SUMS = ("calls", "seconds", "flops", "casts", "bytes_cast", "cast_seconds")


@dataclass
class Advice:
    """A proposed change: the finding in ``found``, the line to write in ``change``. ``gain``, a share of time (0 to 1), sorts."""

    gain: float
    site: str
    found: str
    change: str


@dataclass
class Rows:
    """The rows of a recording and what follows from them; `Record` has the documentation."""

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


def add(row: CallRow, other: CallRow) -> None:
    for name in SUMS:
        setattr(row, name, getattr(row, name) + getattr(other, name))
