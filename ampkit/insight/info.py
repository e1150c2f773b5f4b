"""``ampkit info``: which kernels are loaded and why. Look here first when something is slow."""

from __future__ import annotations

import argparse
import platform
import sys

import torch

from .. import __version__
from ..casting import cpp_wrappers as wrappers
from ..devices import has_instructions_for
from ..kernels import implementation
from ..libraries import BUILD, SWITCHED_OFF

EXAMPLE = "ampkit info"


def add_arguments(_parser: argparse.ArgumentParser) -> None:
    """Add nothing: ``info`` has no arguments."""


def from_command_line(_arguments: argparse.Namespace) -> int:
    """Print one line per fact, in the same format on every machine."""
    for name, value in facts():
        print(f"{name:<16} {value}")
    return 0


def facts() -> list[tuple[str, str]]:
    kernels = implementation()
    slow = "" if has_instructions_for(torch.bfloat16) else ", no instructions for bfloat16: products are slow"
    threads = f"{torch.get_num_threads()} threads{slow}"
    lines = [
        ("ampkit", __version__),
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"),
        ("CPU", f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {threads}"),
    ]
    gpus = [(f"cuda:{i}", torch.cuda.get_device_name(i)) for i in range(torch.cuda.device_count())]
    lines += gpus or [("GPU", "none visible")]
    lines.append(("kernels", f"{kernels.name}: {kernels.why}"))
    if kernels.name == "extension":
        lines += [
            ("built with", f"torch {kernels.built_with}, for torch {kernels.target} and newer"),
            ("CPU kernels", kernels.cpu_capability),
            ("CUDA kernels", f"{'loaded' if kernels.cuda else 'not loaded'}: {kernels.cuda_why}"),
        ]
    lines.append(("O1's wrappers", f"in {'Python' if wrappers.library is None else 'C++'}: {wrappers.why}"))
    if kernels.why != SWITCHED_OFF and (kernels.name != "extension" or wrappers.library is None):
        lines.append(("to build them", f"AMPKIT_BUILD_EXT=1 {BUILD}"))
    return lines
