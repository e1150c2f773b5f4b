"""The one place that decides whether O1's wrappers run in C++: loads ampkit/_casting, or tells why it did not.

The library reads torch's own structures, so it serves the torch it was built with and no other. AMPKIT_EXTENSION decides
as for the kernels: ``auto`` takes it if it loads, ``off`` never does, ``require`` raises ExtensionError where ``auto``
falls back on the wrappers in Python, which do the same, slower.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any

from ..errors import ExtensionError
from ..logs import logger


@dataclass(frozen=True)
class Dispatch:
    """What O1's wrappers are made of in this process, and why."""

    library: Any | None  #: the module ampkit._casting
    why: str  #: in words, with the import error if there was one

    @property
    def name(self) -> str:
        return "Python" if self.library is None else "C++"


def dispatch() -> Dispatch:
    """What was chosen when ampkit was imported."""
    return _dispatch


def _choose(wish: str) -> Dispatch:
    if wish == "off":
        return Dispatch(None, "AMPKIT_EXTENSION=off")
    try:
        library = importlib.import_module("ampkit._casting")
        if not hasattr(getattr(library, "Switch", None), "set"):
            raise ImportError("it was built from older sources; build it again")
    except (ImportError, OSError) as error:
        why = f"ampkit._casting could not be loaded: {error}"
        if wish == "require":
            raise ExtensionError(
                f"AMPKIT_EXTENSION=require, but {why}. Build it with: pip install --no-build-isolation ."
            ) from error
        if not isinstance(error, ModuleNotFoundError):  # it is there, for another torch
            logger.warning("%s. O1 casts in Python, slower; pip install --no-build-isolation . builds it anew.", why)
        return Dispatch(None, why)
    return Dispatch(library, f"built with torch {library.torch_version}")


_dispatch = _choose(os.environ.get("AMPKIT_EXTENSION", "auto"))
