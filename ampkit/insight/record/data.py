"""The rows of a recording: plain data that recorder.py fills, and record.py and advice.py read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FORWARD, BACKWARD, RECOMPUTED, STEP = "forward", "backward", "recomputed", "step"
#: Functions of rows that are not the script's own work.
AMPKIT, GRAD_SCALER = "ampkit", "GradScaler"
_PHASES = {BACKWARD: "bwd", RECOMPUTED: "again"}


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


#: The fields that are summed when rows are merged.
SUMS = ("calls", "seconds", "flops", "casts", "bytes_cast", "cast_seconds")


@dataclass
class Advice:
    """A proposed change: the finding in ``found``, the line to write in ``change``. ``gain``, a share of time (0 to 1), sorts."""

    gain: float
    site: str
    found: str
    change: str


def add(row: CallRow, other: CallRow) -> None:
    for name in SUMS:
        setattr(row, name, getattr(row, name) + getattr(other, name))
