"""The command line: ``python -m ampkit COMMAND``. Each command is a function here, or in the room whose work it does.

``info`` tells which kernels are loaded and why, which is the first thing to look at when something is slow. ``run`` runs a
script of Apex's with the drop-in in place.
"""

import argparse
import platform
import sys

import torch

from ampkit import __version__
from ampkit.apex import running
from ampkit.casting.library import dispatch
from ampkit.kernels import implementation
from ampkit.libraries import BUILD, SWITCHED_OFF


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ampkit", description="Mixed precision for PyTorch scripts.")
    parser.add_argument("--version", action="version", version=f"ampkit {__version__}")
    # torch.distributed.launch puts this in front of everything that it was given.
    parser.add_argument("--local-rank", "--local_rank", dest="local_rank", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_info(commands)
    add_run(commands)
    chosen = parser.parse_args(arguments)
    return chosen.run(chosen)


def add_info(commands) -> None:
    parser = commands.add_parser("info", help="which kernels are loaded, and why")
    parser.set_defaults(run=info)


def add_run(commands) -> None:
    parser = commands.add_parser("run", help="run a script that says 'from apex import amp'")
    running.add_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.local_rank is not None:
        arguments.arguments.insert(0, f"--local-rank={arguments.local_rank}")
    return running.from_command_line(arguments)


def info(_arguments: argparse.Namespace) -> int:
    """Prints one line per fact, the same on every machine."""
    for name, value in facts():
        print(f"{name:<16} {value}")
    return 0


def facts() -> list[tuple[str, str]]:
    kernels = implementation()
    lines = [
        ("ampkit", __version__),
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"),
        ("CPU", f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"),
    ]
    for i in range(torch.cuda.device_count()):
        lines.append((f"cuda:{i}", torch.cuda.get_device_name(i)))
    if torch.cuda.device_count() == 0:
        lines.append(("GPU", "none visible"))
    lines.append(("kernels", f"{kernels.name}: {kernels.why}"))
    if kernels.name == "extension":
        lines += [
            ("built with", f"torch {kernels.built_with}, for torch {kernels.target} and newer"),
            ("CPU kernels", kernels.cpu_capability),
            ("CUDA kernels", f"{'loaded' if kernels.cuda else 'not loaded'}: {kernels.cuda_why}"),
        ]
    lines.append(("O1's wrappers", f"in {dispatch().name}: {dispatch().why}"))
    if kernels.why != SWITCHED_OFF and (kernels.name != "extension" or dispatch().library is None):
        lines.append(("to build them", f"AMPKIT_BUILD_EXT=1 {BUILD}"))
    return lines


if __name__ == "__main__":
    sys.exit(main())
