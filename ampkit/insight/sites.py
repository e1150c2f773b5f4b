"""The site of an operator in a script: the user's line, and the name by which the line calls torch.

`look` walks up the Python stack, past frames of torch, ampkit and the standard library: the site of a ``nn.Softmax`` is the line
that calls the module. An operator that autograd runs has no line of its own: watching.py gives it the line of its forward.
"""

from __future__ import annotations

import ast
import functools
import linecache
import os
import sys
import sysconfig
import types
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import _ops
from torch.utils import _python_dispatch

from .. import events, patching
from ..casting.engine import active_casting
from ..iteration import block, reach

_TORCH = os.path.dirname(torch.__file__)
#: Files of torch whose functions scripts call, and their public modules.
_PUBLIC = {
    F.__file__: "torch.nn.functional",
    os.path.join(_TORCH, "functional.py"): "torch",
    os.path.join(_TORCH, "nn", "utils", "clip_grad.py"): "torch.nn.utils",
    os.path.join(_TORCH, "amp", "grad_scaler.py"): "torch.amp.GradScaler",
    os.path.join(_TORCH, "distributed", "fsdp", "sharded_grad_scaler.py"): "torch.amp.GradScaler",
}
_UNDER_OTHER_NAMES = {"_get_total_norm": "get_total_norm", "_clip_grads_with_norm_": "clip_grads_with_norm_"}
_AMPKIT = os.path.dirname(os.path.dirname(__file__))
_FOLDERS = {
    name: os.path.join(os.path.realpath(path), "")
    for name, path in {
        "torch": _TORCH,
        "casting": os.path.join(_AMPKIT, "casting"),
        "insight": os.path.dirname(__file__),
        "scripts": os.path.join(_AMPKIT, "scripts"),
        "ampkit": _AMPKIT,
        "site-packages": sysconfig.get_paths()["purelib"],
        "stdlib": sysconfig.get_paths()["stdlib"],
    }.items()
}
_MODULES = (events, patching, block, reach, _ops, _python_dispatch)
_WATCHING = (os.path.join(os.path.dirname(__file__), ""), *(module.__file__ for module in _MODULES))
_PASSED_OVER = ("torch", "casting", "insight", "scripts", "ampkit", "stdlib")
#: Classes of operators in `ast` whose method has another name.
_OPERATORS = {"mult": "mul", "div": "truediv", "matmult": "matmul", "bitand": "and", "bitor": "or", "bitxor": "xor"}


@dataclass(frozen=True)
class Site:
    """A line of the user's code."""

    file: str
    line: int

    @property
    def source(self) -> str:
        """The line itself, without indentation; empty where the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"


def look(*, past_engine: bool = False) -> tuple[Site | None, str | None, set[str]]:
    """Return the user's line that runs, and the public name of the torch function that it calls, both None if not found.

    The third value has the owners of the frames in between, as `_FOLDERS` names them. The walk ends at autograd's engine, unless
    ``past_engine``: the frames above it called ``backward()``.
    """
    frame, function, passed = sys._getframe().f_back, None, set[str]()
    while frame is not None:
        code = frame.f_code
        owner = _owner(code.co_filename)
        public = code.co_filename in _PUBLIC and _UNDER_OTHER_NAMES.get(code.co_name, code.co_name)
        if public and not public.startswith(("_", "no_grad_wrapper")):
            function = f"{_PUBLIC[code.co_filename]}.{public}"
        elif function is None and owner in ("torch", "site-packages", "user"):
            function = _called(frame)
        if owner not in _PASSED_OVER:
            return _site(code.co_filename, frame.f_lineno), function, passed
        passed.add(owner)
        if code.co_name == "_engine_run_backward" and not past_engine:
            break
        frame = frame.f_back
    return None, None, passed


_site = functools.cache(Site)


@functools.cache
def _owner(file: str) -> str:
    """The owner of a file: the first of `_FOLDERS` that contains it, or ``"user"``."""
    if file.startswith("<frozen") or file == "<string>":
        return "stdlib"
    path = os.path.realpath(file)
    return next((name for name, folder in _FOLDERS.items() if path.startswith(folder)), "user")


def hide_observers(error: BaseException) -> None:
    """Remove the frames of observers from an exception's traceback."""
    frame = error.__traceback__
    while frame is not None:
        after = frame.tb_next
        while after is not None and after.tb_frame.f_code.co_filename.startswith(_WATCHING):
            after = after.tb_next
        frame.tb_next = frame = after


# The name of the function that a line calls

_names: dict[tuple[types.CodeType, int], str | None] = {}


def _called(frame: types.FrameType) -> str | None:
    """The torch function that the current expression of a frame calls (``"torch.exp"``, ``"torch.Tensor.__mul__"``), else None."""
    key = frame.f_code, frame.f_lasti
    if key not in _names:
        try:
            _names[key] = _name_of(_expression(frame), frame)
        except (SyntaxError, ValueError, IndexError, AttributeError):
            _names[key] = None
    return _names[key]


def _expression(frame: types.FrameType) -> ast.AST:
    position = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    first, last, begin, end = (number or 0 for number in position)
    lines = [linecache.getline(frame.f_code.co_filename, line).encode() for line in range(first, last + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    statement = ast.parse(b"".join(lines).strip()).body[0]
    return statement.value if isinstance(statement, (ast.Expr, ast.Assign, ast.Return)) else statement


def _name_of(node: Any, frame: types.FrameType) -> str | None:
    if isinstance(node, (ast.BinOp, ast.AugAssign)):
        name = type(node.op).__name__.lower()
        return f"torch.Tensor.__{'i' * isinstance(node, ast.AugAssign)}{_OPERATORS.get(name, name)}__"
    if not isinstance(node, ast.Call):
        return None
    names, owner = [], node.func
    while isinstance(owner, ast.Attribute):
        names.insert(0, owner.attr)
        owner = owner.value
    root = None
    if isinstance(owner, ast.Name):
        root = frame.f_locals.get(owner.id, frame.f_globals.get(owner.id))
    if not names:  # a bare name: from torch import exp
        name = getattr(root, "__name__", "")
        owners = (module for module in (F, torch) if callable(root) and _is(getattr(module, name, None), root))
        return next((f"{module.__name__}.{name}" for module in owners), None)
    while names[:-1] and isinstance(root, types.ModuleType):
        root = getattr(root, names.pop(0))
    if isinstance(root, types.ModuleType):
        return f"{root.__name__}.{names[-1]}"
    return f"torch.Tensor.{names[-1]}" if hasattr(torch.Tensor, names[-1]) else None


def _is(function: Any, bound: Any) -> bool:
    """Whether ``bound``, which a script has imported by name, is this function of torch, or its original if torch is patched."""
    casting = active_casting()
    return function is bound or (casting is not None and casting.original_of(function) is bound)
