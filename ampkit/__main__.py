"""The command line: ``ampkit COMMAND``, or ``python -m ampkit COMMAND``. Each command is a row of `COMMANDS`.

A command's module has ``add_arguments(parser)``, ``from_command_line(arguments) -> int``, which returns the exit code, and
``EXAMPLE``, a command that runs. A module is imported only when its command is called.
"""

from __future__ import annotations

import argparse
import importlib
import sys

from ampkit import __version__

COMMANDS = {
    "info": ("which kernels are loaded, and why", "ampkit.insight.info"),
    "check": ("say what each level would change in a script", "ampkit.insight.check"),
    "record": ("say what each line of a script computes in, and what it takes", "ampkit.insight.record.command"),
    "diagnose": ("run a script until its first inf or NaN, and say why", "ampkit.insight.diagnose_script"),
    "tune": ("train a model at every level, and say which to take", "ampkit.insight.tuning.tune"),
    "run": ("run a script that says 'from apex import amp'", "ampkit.scripts.running"),
}
AROUND_SCRIPTS = "ampkit.apex.importing:around"
"""The setup of commands that run a script (`ampkit.scripts.running.Run`): they know nothing of the drop-in."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command that the arguments name, and return its exit code: 0 is success, 2 a mistake on the command line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="ampkit",
        description="Mixed precision for PyTorch scripts.",
        epilog="ampkit COMMAND --help says more about a command.",
    )
    parser.add_argument("--version", action="version", version=f"ampkit {__version__}")
    # torch.distributed.launch inserts this option before all other arguments.
    parser.add_argument("--local-rank", "--local_rank", dest="local_rank", help=argparse.SUPPRESS)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (brief, home) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=brief, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name in arguments:
            module = importlib.import_module(home)
            subparser.description = f"{brief[0].upper()}{brief[1:]}."
            subparser.epilog = f"example, in a checkout of ampkit:\n  {module.EXAMPLE}"
            module.add_arguments(subparser)
            subparser.set_defaults(from_command_line=module.from_command_line, around=AROUND_SCRIPTS)
    chosen = parser.parse_args(arguments)
    if chosen.command is None:
        parser.print_help()
        return 0
    return chosen.from_command_line(chosen)


if __name__ == "__main__":
    sys.exit(main())
