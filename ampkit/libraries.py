"""The decision whether a compiled library of ampkit is used: the kernels, and O1's wrappers in C++.

AMPKIT_EXTENSION is read when ampkit is imported: ``auto`` (default) takes a library if it loads, ``off`` never does, ``require``
raises ExtensionError where ``auto`` falls back on Python, which computes the same, slower. ``emulated`` is for ampkit's own tests:
as ``require``, with the CUDA kernels, compiled for the host (tests/emulation), in the place of those for the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from .errors import ExtensionError
from .logs import logger

Library = TypeVar("Library")

_IN_A_CLONE = (Path(__file__).resolve().parents[1] / "setup.py").exists()
#: The command that builds the libraries. In a clone, whose sources hide an installed copy of ampkit, it puts them there.
BUILD = f"pip install --no-build-isolation {'--editable ' if _IN_A_CLONE else ''}."

#: The reason why a library that may be there is not used.
SWITCHED_OFF = "AMPKIT_EXTENSION=off"

#: The values that require a library.
_STRICT = ("require", "emulated")


def cuda_is_emulated() -> bool:
    """Whether the CUDA kernels run on the host, for tests."""
    return os.environ.get("AMPKIT_EXTENSION") == "emulated"


def load_library(name: str, load: Callable[[], Library]) -> tuple[Library | None, str]:
    """The result of ``load()``, or None where it is not wanted or raises; and why, in words."""
    wish = os.environ.get("AMPKIT_EXTENSION", "auto")
    if wish not in ("auto", "off", "require", "emulated"):
        raise ExtensionError(f"AMPKIT_EXTENSION is {wish!r}; expected 'auto', 'off' or 'require'")
    if wish == "off":
        return None, SWITCHED_OFF
    try:
        return load(), f"AMPKIT_EXTENSION={wish}, and {name} loaded"
    except (ImportError, OSError, RuntimeError) as error:
        why = f"{name} could not be loaded: {error}"
        if wish in _STRICT or not isinstance(error, ModuleNotFoundError):
            report_broken(why, error)
        return None, why


def report_broken(why: str, error: Exception) -> None:
    """Raise ExtensionError where libraries are required, else log a warning: a library is broken or for another torch."""
    wish = os.environ.get("AMPKIT_EXTENSION", "auto")
    if wish in _STRICT:
        raise ExtensionError(f"AMPKIT_EXTENSION={wish}, but {why}. Build it with: {BUILD}") from error
    logger.warning("%s. ampkit works without it, slower; %s builds it anew.", why, BUILD)
