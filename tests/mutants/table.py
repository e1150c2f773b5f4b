"""All planted faults, from the folder faults, and how one is planted."""

from __future__ import annotations

from pathlib import Path

from .faults import (
    advice,
    casting,
    cpp,
    cuda,
    drop_in,
    kernels,
    loss_scale,
    masters,
    models,
    moments,
    optimizers,
    parallel,
    sessions,
)
from .mutant import Mutant

MUTANTS: list[Mutant] = [
    *kernels.FAULTS,
    *optimizers.FAULTS,
    *moments.FAULTS,
    *masters.FAULTS,
    *loss_scale.FAULTS,
    *models.FAULTS,
    *sessions.FAULTS,
    *advice.FAULTS,
    *casting.FAULTS,
    *parallel.FAULTS,
    *drop_in.FAULTS,
    *cpp.FAULTS,
    *cuda.FAULTS,
]


class StaleRow(Exception):
    """The text to be replaced does not stand in its file exactly once."""


def planted(mutant: Mutant, folder: Path, number: int = 0) -> str:
    """The mutant's file with the fault in it: for good, or behind the switch of this number."""
    text = (folder / mutant.file).read_text()
    found = text.count(mutant.old)
    if found != 1:
        raise StaleRow(f"{mutant.old!r} stands {found} times in {mutant.file}, expected once")
    new = mutant.new
    if number and mutant.old.endswith(";"):
        new = f"if (AMPKIT_MUTANT({number})) {{ {mutant.new} }} else {{ {mutant.old} }}"
    elif number:
        new = f"(AMPKIT_MUTANT({number}) ? ({mutant.new}) : ({mutant.old}))"
    return text.replace(mutant.old, new)
