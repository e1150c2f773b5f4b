"""The library of wrappers in C++, ampkit._casting, where it was built for this torch, or None and the reason why.

The library reads torch's own structures, so it serves the torch it was built with and no other. Without it the wrappers
in Python do the same, slower. libraries.py tells how AMPKIT_EXTENSION decides, once, at import.
"""

from __future__ import annotations

import importlib
from typing import Any

from ..libraries import load_library


def _import() -> Any:
    library = importlib.import_module("ampkit._casting")
    if not hasattr(getattr(library, "Switch", None), "set"):
        raise ImportError("it was built from older sources; build it again")
    return library


library, why = load_library("ampkit._casting", _import)
if library is not None:
    why = f"built with torch {library.torch_version}"
