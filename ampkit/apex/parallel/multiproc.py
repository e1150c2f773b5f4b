"""``python -m apex.parallel.multiproc script.py args...``: one process for each GPU, with ``--world-size N --rank i``.

Output of all ranks but the first goes to ``GPU_<rank>.log``. Scripts run under the drop-in, as by ``python -m ampkit run``.
Use torchrun for new scripts. Without a GPU, ``--world-size`` among the arguments gives the number of processes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext

import torch


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script in every process, and return the first exit status that is not 0."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if not argv:
        print("usage: python -m apex.parallel.multiproc script.py [arguments]", file=sys.stderr)
        return 2
    world_size = torch.cuda.device_count() or int(_value(argv, "--world-size", "1"))
    processes = []
    for rank in range(world_size):
        command = _with(_with(argv, "--world-size", str(world_size)), "--rank", str(rank))
        with open(f"GPU_{rank}.log", "w") if rank else nullcontext() as log:
            processes.append(subprocess.Popen([sys.executable, "-m", "ampkit", "run", *command], stdout=log))
    statuses = [process.wait() for process in processes]
    return next((status for status in statuses if status), 0)


def _value(arguments: list[str], name: str, default: str) -> str:
    return arguments[arguments.index(name) + 1] if name in arguments[:-1] else default


def _with(arguments: list[str], name: str, value: str) -> list[str]:
    """The arguments with this option set, at its place or at the end."""
    if name not in arguments:
        return [*arguments, name, value]
    at = arguments.index(name)
    return [*arguments[: at + 1], value, *arguments[at + 2 :]]


if __name__ == "__main__":
    sys.exit(main())
