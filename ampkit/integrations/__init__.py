"""Adapters for frameworks that own the training loop, one module each; a module imports its framework, and nothing else does."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType


def framework(*names: str, install: str) -> ModuleType:
    """The first of these modules that is loaded already, else the first that can be. ``install`` is what to give to pip."""
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not name.startswith(f"{error.name}.") and name != error.name:
                raise  # it is there, and something that it needs is not
    raise ImportError(f"This adapter is for {names[0]}, which is not installed here: pip install {install}")
