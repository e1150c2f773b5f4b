"""A planted fault, as the tables of this folder hold it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """``new`` in the place of ``old``, which stands once in ``file``, breaks a property; ``tests`` notice.

    Tests are named as pytest does, from the folder tests on, and are part of `make test`: of its run with this AMPKIT_EXTENSION.

    In C++ ``old`` and ``new`` are expressions of one type, or statements that end with a semicolon and declare nothing: both
    are compiled, and one is chosen at run time.
    """

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]
    extension: str = "require"

    @property
    def extensions(self) -> tuple[str, ...]:
        """The runs of `make test` that must notice: what both devices compile is tested in the emulated CUDA kernels too."""
        on_both = self.file.startswith(("csrc/functors/", "csrc/step.h"))
        return (self.extension, "emulated") if on_both else (self.extension,)

    @property
    def is_cpp(self) -> bool:
        return self.file.startswith("csrc/")
