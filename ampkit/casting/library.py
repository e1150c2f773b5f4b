"""The library of wrappers in C++, ampkit._casting, where it was built for this torch, or the reason why it is missing.

The library reads torch's own structures, so it serves the torch it was built with and no other. Without it the wrappers
in Python do the same, slower. libraries.py tells how AMPKIT_EXTENSION decides.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from ..libraries import load_library


@dataclass(frozen=True)
class Dispatch:
    """The wrappers of this process, in C++ or Python, and why."""

    library: Any | None  #: the module ampkit._casting
    why: str  #: in words, with the import error if there was one

    @property
    def name(self) -> str:
        return "Python" if self.library is None else "C++"


def dispatch() -> Dispatch:
    """The choice made when ampkit was imported."""
    return _dispatch


def _import() -> Any:
    library = importlib.import_module("ampkit._casting")
    if not hasattr(getattr(library, "Switch", None), "set"):
        raise ImportError("it was built from older sources; build it again")
    return library


_library, _why = load_library("ampkit._casting", _import)
_dispatch = Dispatch(_library, _why if _library is None else f"built with torch {_library.torch_version}")
