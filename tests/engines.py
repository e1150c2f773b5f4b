"""An O1 engine for a test: installed, and taken back whatever happens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ampkit.casting import Casting


@contextlib.contextmanager
def o1(lower_precision: torch.dtype = torch.bfloat16, **settings) -> Iterator[Casting]:
    """Casting on the CPU inside the block."""
    casting = Casting(lower_precision, device_types=("cpu",), **settings)
    casting.install()
    try:
        yield casting
    finally:
        casting.close()
