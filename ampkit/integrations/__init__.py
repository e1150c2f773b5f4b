"""Adapters for frameworks that own the training loop, one module each. Only the adapter imports its framework."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType


def framework(*names: str, install: str) -> ModuleType:
    """Return the first of these modules that is loaded, else the first that can be imported. ``install`` is the name for pip."""
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not name.startswith(f"{error.name}.") and name != error.name:
                raise  # the module exists, but one of its dependencies does not
    raise ImportError(f"This adapter is for {names[0]}, which is not installed here: pip install {install}")
