"""An O1 engine for a test: installed, and taken back whatever happens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ampkit.casting import Casting


@contextlib.contextmanager
def o1(
    lower_precision: torch.dtype = torch.bfloat16, device_types: tuple[str, ...] = ("cpu",), **settings
) -> Iterator[Casting]:
    """Casting on the CPU, or on other devices, inside the block."""
    casting = Casting(lower_precision, device_types=device_types, **settings)
    casting.install()
    try:
        yield casting
    finally:
        casting.close()
