"""The path of a reader: ampkit's own calls in one iteration, the files they are in, and the moves from file to file.

    python benchmarks/flow.py [--levels O1,O2,O5] [--list]

The fourth iteration of Linear, LayerNorm, ReLU, Linear with torch.optim.AdamW is traced with sys.setprofile. A call is a Python
function of the package that begins (comprehensions included), a move is a call in another file than the call before. --list prints
each call.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import NamedTuple

import torch
from torch import nn

import ampkit

PACKAGE = os.path.dirname(os.path.abspath(ampkit.__file__)) + os.sep


class Flow(NamedTuple):
    """The calls of one iteration, and the lines that `--list` prints."""

    calls: int
    files: int
    moves: int
    lines: list[str]


def flow(level: str) -> Flow:
    """Trace the fourth iteration at one level, and close the session afterwards."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
    x = torch.randn(8, 64)
    files: list[str] = []
    lines: list[str] = []

    def trace(frame: object, event: str, _: object) -> None:
        code = frame.f_code  # type: ignore[attr-defined]
        if event == "call" and code.co_filename.startswith(PACKAGE):
            files.append(code.co_filename[len(PACKAGE) :])
            lines.append(f"{files[-1]}:{code.co_firstlineno} {code.co_qualname}")

    def iteration() -> None:
        loss = model(x).float().square().mean()
        with ampkit.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    try:
        for _ in range(3):
            iteration()
        sys.setprofile(trace)
        try:
            iteration()
        finally:
            sys.setprofile(None)
    finally:
        ampkit.close()
    moves = sum(one != before for one, before in zip(files[1:], files))
    return Flow(len(files), len(set(files)), moves, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", default="O1,O2,O5")
    parser.add_argument("--list", action="store_true", help="print every call")
    args = parser.parse_args()
    for level in args.levels.split(","):
        found = flow(level)
        print(f"{level}: {found.calls} calls in {found.files} files, {found.moves} moves from file to file")
        if args.list:
            print("\n".join(f"  {line}" for line in found.lines))


if __name__ == "__main__":
    main()
