"""What several test files share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from ampkit.casting import Casting

#: The folder that holds setup.py.
ROOT = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def o1(
    lower_precision: torch.dtype = torch.bfloat16, device_types: tuple[str, ...] = ("cpu",), **settings
) -> Iterator[Casting]:
    """An O1 engine, on the CPU or on other devices: installed, and taken back whatever happens."""
    casting = Casting(lower_precision, device_types=device_types, **settings)
    casting.install()
    try:
        yield casting
    finally:
        casting.close()
