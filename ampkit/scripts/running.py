"""Run a script or module as ``__main__``, for ``ampkit run`` and the tools that observe; everything is undone when it ends.

The options are also stored in an environment variable. Processes that the script spawns (``mp.spawn``, a DataLoader with
``spawn``) read it when they import the script again, and are set up alike: see spawned.py.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import importlib.machinery
import importlib.util
import json
import os
import pickle
import pkgutil
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from .. import api
from ..logs import is_rank_zero
from ..patching import PatchSet
from . import cpu, torch_six
from .variables import variable

EXAMPLE = "ampkit run --device cpu tests/apex/scripts/classify.py --opt-level O1"
VARIABLE = "AMPKIT_RUN"
SPAWNED = "ampkit.scripts.spawned"
LOADS_PICKLES = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
"""torch's own variable: ``torch.load`` unpickles anything unless it is passed ``weights_only``."""

PICKLES_REFUSED = (
    "ampkit: ampkit run --allow-pickle ... loads such files as torch did before 2.6, without an edit of the script. A "
    "file may run code of its own when it is loaded: only for files that you trust."
)

NO_CUDA = ("Found no NVIDIA driver", "Torch not compiled with CUDA")
"""The beginnings of torch's errors when a script calls ``.cuda()`` on a machine without a GPU."""

RUNS_ON_THE_CPU = "ampkit: ampkit run --device cpu ... runs the script's CUDA calls on the CPU."

_until_exit = ExitStack()
"""In a spawned process: contexts that last as long as the process."""


@dataclass(frozen=True)
class Run:
    """A script or module to run, and its options."""

    target: str
    is_module: bool = False
    device: str | None = None
    replace: bool = False
    allow_pickle: bool = False
    needs_apex: bool = True
    """Whether all imports find the drop-in; else only imports that the script cannot do without."""
    around: str | None = None
    """A further setup, as ``module:function``: called with the run, and whether this process was spawned, it returns a context."""


def add_arguments(parser: argparse.ArgumentParser, observes: bool = False) -> None:
    """Add the options of ``run``, the script and its arguments. A tool that ``observes`` installs the drop-in on ``--apex``."""
    parser.set_defaults(apex=not observes)
    if observes:
        parser.add_argument(
            "--apex",
            action="store_true",
            help="install the drop-in for all; without it, for a script that cannot do without apex",
        )
    parser.add_argument(
        "--device",
        choices=["cpu"],
        help="run CUDA calls of the script on the CPU, in bfloat16 unless AMPKIT_LOWER_PRECISION says otherwise",
    )
    parser.add_argument("--replace", action="store_true", help="take the place of an installed apex that has amp, too")
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="have torch.load unpickle any object, as before torch 2.6: old checkpoints load, and may run code",
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="the name that follows is a module, as for python -m"
    )
    parser.add_argument("target", metavar="SCRIPT", help="script.py, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")


def from_command_line(arguments: argparse.Namespace) -> int:
    """Run the script of the command line as Python would run it. If the script exits, ampkit exits with its code."""
    if arguments.local_rank is not None:
        arguments.arguments.insert(0, f"--local-rank={arguments.local_rank}")
    run = Run(
        arguments.target,
        arguments.module,
        arguments.device,
        arguments.replace,
        arguments.allow_pickle,
        arguments.apex or arguments.replace,
        arguments.around,
    )
    if not run.is_module and not os.path.exists(run.target):
        print(f"ampkit {arguments.command}: there is no {run.target!r} here. For a module: -m NAME.", file=sys.stderr)
        return 2
    execute_as_main(run, arguments.arguments, arguments.command)
    return 0


def execute_as_main(run: Run, arguments: Sequence[str], command: str = "run") -> None:
    """Call `execute` in a process that does nothing else; exceptions are printed as plain Python prints them."""
    try:
        execute(run, arguments)
    except BaseException as error:
        if isinstance(error, pickle.UnpicklingError) and not run.allow_pickle:
            error.add_note(PICKLES_REFUSED)
        if run.device is None and str(error).startswith(NO_CUDA):
            error.add_note(RUNS_ON_THE_CPU.replace("ampkit run", f"ampkit {command}"))
        _hide_our_frames(error)
        raise


def execute(run: Run, arguments: Sequence[str]) -> dict[str, Any]:
    """Run the script as ``__main__`` and return its globals. torch, sys and the environment are restored afterwards."""
    with ExitStack() as stack:
        stack.enter_context(_interpreter_state())
        stack.enter_context(set_up(run))
        path, code = _find(run)
        absolute = run if run.is_module else replace(run, target=os.path.abspath(run.target))
        stack.enter_context(variable(VARIABLE, json.dumps(asdict(absolute))))
        sys.argv = [path if run.is_module else run.target, *arguments]
        sys.path[0] = os.getcwd() if run.is_module else os.path.dirname(os.path.abspath(path))
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        stack.callback(api.close)
        return fill(main.__dict__, path, code, _package_of(run))


@contextmanager
def set_up(run: Run, is_child: bool = False) -> Iterator[None]:
    """Patch torch and argparse for old scripts and launchers, and replace CUDA by the CPU if the run asks for it."""
    with ExitStack() as stack:
        if run.around is not None:
            stack.enter_context(pkgutil.resolve_name(run.around)(run, is_child))
        patches = PatchSet()
        stack.callback(patches.restore)
        if importlib.util.find_spec("torch._six") is None:
            patches.set(sys.modules, "torch._six", torch_six)
            patches.set(torch, "_six", torch_six)
        parser = argparse.ArgumentParser
        patches.set(parser, "parse_known_args", _with_local_rank(parser.parse_known_args))
        if run.allow_pickle:
            stack.enter_context(_pickles_allowed(silent=is_child))
        if run.device == "cpu":
            stack.enter_context(cpu.in_place_of_cuda(silent=is_child))
        yield


def _with_local_rank(original: Callable) -> Callable:
    """Wrap ``parse_known_args``: ``LOCAL_RANK``, as launchers set it now, is the default of a script's ``--local_rank``."""

    @functools.wraps(original)
    def parse_known_args(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        for action in self._actions if "LOCAL_RANK" in os.environ else ():
            if action.dest == "local_rank" and action.option_strings:
                action.default, action.required = os.environ["LOCAL_RANK"], False
        return original(self, *args, **kwargs)

    return parse_known_args


def fill(names: dict[str, Any], path: str, code: types.CodeType, package: str | None) -> dict[str, Any]:
    """Execute a script with ``names``, the globals of a module, and return them."""
    names.update(
        __file__=path,
        __builtins__=__builtins__,
        __package__=package,
        __cached__=None,
        __loader__=None,
        __spec__=_MainSpec(path, package),
    )
    exec(code, names)
    return names


class _MainSpec(importlib.machinery.ModuleSpec):
    """The spec of the main module. Spawned processes import it by the name `SPAWNED`, which sets them up."""

    def __init__(self, path: str, package: str | None) -> None:
        super().__init__(SPAWNED, None, origin=path)
        self._package = package or ""

    @property
    def parent(self) -> str:
        return self._package


def resume_in_child(names: dict[str, Any]) -> None:
    """Set up a process that the script spawned until it exits, and fill ``names`` by executing the script."""
    run = Run(**json.loads(os.environ[VARIABLE]))
    atexit.register(_until_exit.close)  # before torch and the import system are torn down
    _until_exit.enter_context(set_up(run, is_child=True))
    path, code = _find(run)
    fill(names, path, code, _package_of(run))


def _find(run: Run) -> tuple[str, types.CodeType]:
    if not run.is_module:
        if os.path.isdir(run.target):
            run = replace(run, target=os.path.join(run.target, "__main__.py"))
        path = os.path.abspath(run.target)  # plain Python has it so in __file__ and in tracebacks
        with open(path, "rb") as file:
            return path, compile(file.read(), path, "exec", dont_inherit=True)
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    spec = importlib.util.find_spec(run.target)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{run.target}.__main__")
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(
            f"No module named {run.target!r}, or it is a package without __main__.", name=run.target
        )
    return spec.origin, spec.loader.get_code(spec.name)


def _package_of(run: Run) -> str | None:
    if not run.is_module:
        return None
    spec = importlib.util.find_spec(run.target)
    name = getattr(spec.loader, "name", run.target) if spec is not None else run.target
    return name if spec is not None and spec.submodule_search_locations is not None else name.rpartition(".")[0]


def _hide_our_frames(error: BaseException) -> None:
    """Wrap ``sys.excepthook``, or the script's own hook, so that the traceback printed for this error begins in the script."""
    hook = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, traceback: types.TracebackType | None) -> None:
        if value is error:
            traceback = _script_traceback(traceback)
            value.__traceback__ = traceback  # Python's own hook prints this one
        hook(kind, value, traceback)

    sys.excepthook = show


def _script_traceback(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without ampkit's frames: None if the script could not be compiled, unchanged if it had not begun."""
    frame = traceback
    while frame is not None and frame.tb_frame.f_code not in (fill.__code__, _find.__code__):
        frame = frame.tb_next
    if frame is None:  # the script had not begun
        return traceback
    frame = frame.tb_next
    while frame is not None and "importlib" in frame.tb_frame.f_code.co_filename:
        frame = frame.tb_next
    return frame


@contextmanager
def _pickles_allowed(silent: bool = False) -> Iterator[None]:
    """Let ``torch.load`` unpickle anything inside, unless ``weights_only`` is passed. Prints a line on standard error."""
    if not silent and is_rank_zero():
        print(
            "ampkit: --allow-pickle: torch.load unpickles any object, and a file may run code of its own when it is loaded. "
            "Load only files that you trust.",
            file=sys.stderr,
        )
    with variable(LOADS_PICKLES, "1"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f"Environment variable {LOADS_PICKLES}")
        yield


@contextmanager
def _interpreter_state() -> Iterator[None]:
    """Restore ``sys.argv``, ``sys.path`` and ``sys.modules["__main__"]`` after the block."""
    argv, path, main = list(sys.argv), list(sys.path), sys.modules.get("__main__")
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = argv, path
        if main is not None:
            sys.modules["__main__"] = main
