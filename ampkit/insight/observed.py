"""`observe`: run a script under an observer, for ``ampkit check``, ``record`` and ``diagnose``."""

from __future__ import annotations

import argparse
import sys
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..scripts import running
from .sites import hide_observers
from .watching import Enough

_LEAST = {"iterations": 1, "skip": 0, "after": 1}


def observe(arguments: argparse.Namespace, watch: AbstractContextManager[Any]) -> tuple[int, BaseException | None]:
    """Run the script to its end, or until the watch raises `Enough`; return the exit code and the exception of the script.

    Raise that exception again after printing; its traceback has no frames of observers. Compiled code runs eagerly.
    """
    for name, least in _LEAST.items():
        if (value := vars(arguments).get(name, least)) < least:
            words = f"--{name} {value} is not accepted: expected at least {least}."
            print(f"ampkit {arguments.command}: {words}", file=sys.stderr)
            return 2, None
    hook = sys.excepthook
    try:
        with torch.compiler.set_stance("force_eager"), watch:
            return running.from_command_line(arguments), None
    except Enough:
        sys.excepthook = hook
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            hide_observers(error)
            return 1, error
    return 0, None
