"""A fault as a replacement of bytes in one file, and the tables of faults."""

from __future__ import annotations

import ast
import re
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TABLES = Path(__file__).parent


class StaleRow(Exception):
    """An error for a row of promises.toml whose place is not there exactly once."""


@dataclass(frozen=True)
class Fault:
    """``new`` replaces the bytes from ``start`` to ``end`` of ``file``; ``tests`` are pytest's names, from the folder tests on."""

    file: str
    line: int
    start: int
    end: int
    old: str
    new: str
    tests: tuple[str, ...] = ()
    promise: str = ""
    extension: str = "require"

    def __str__(self) -> str:
        change = f"{' '.join(self.old.split())}  ->  {' '.join(self.new.split())}"
        return f"{self.file}:{self.line}  {change}" + (f"  ({self.promise})" if self.promise else "")

    @property
    def is_cpp(self) -> bool:
        return self.file.startswith("csrc/")

    @property
    def extensions(self) -> tuple[str, ...]:
        """The AMPKIT_EXTENSION of each run that must notice: the CPU and the emulated CUDA kernels share csrc/functors."""
        on_both = self.file.startswith(("csrc/functors/", "csrc/step.h"))
        return (self.extension, "emulated") if on_both else (self.extension,)

    def planted(self, folder: Path) -> str:
        source = (folder / self.file).read_bytes()
        return (source[: self.start] + self.new.encode() + source[self.end :]).decode()


def replacement(file: str, source: str, node: ast.expr | ast.stmt, new: str, **more) -> Fault:
    """The fault that replaces ``node`` by ``new``; "" drops a statement."""
    lines = [0]
    for line in source.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    start, end = lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset
    old = source.encode()[start:end].decode()
    if isinstance(node, ast.expr):
        new = f"({new})"
    else:
        new = textwrap.indent(new or "pass", " " * node.col_offset).lstrip()
    return Fault(file, node.lineno, start, end, old, new, **more)


def rows(table: str = "promises") -> list[dict]:
    return tomllib.loads((TABLES / f"{table}.toml").read_text())["fault"]


def named(row: dict, folder: Path) -> Fault:
    """Return the fault of a row of promises.toml, in the project in ``folder``; raise `StaleRow` if its place is not there once."""
    file, _, function = row["where"].partition("::")
    source = (folder / file).read_text() if (folder / file).exists() else ""
    extension = row.get("extension", "require")
    more = {"tests": tuple(row["tests"]), "promise": row["promise"], "extension": extension}
    if file.startswith("csrc/"):
        places = list(re.finditer(r"\s+".join(map(re.escape, row["old"].split())), source))
        faults = [_in_cpp(file, source, place, row["new"], more) for place in places]
    else:
        nodes = list(_nodes_like(row["old"], _function(ast.parse(source), function), row["new"]))
        faults = [replacement(file, source, node, row["new"], **more) for node in nodes]
    if len(faults) != 1:
        count = f"{len(faults)} times in {row['where']}, expected once"
        raise StaleRow(f"{row['promise']!r}: {row['old']!r} stands {count}")
    return faults[0]


def _in_cpp(file: str, source: str, place: re.Match, new: str, more: dict) -> Fault:
    start, end = (len(source[:at].encode()) for at in place.span())
    return Fault(file, source.count("\n", 0, place.start()) + 1, start, end, place[0], new, **more)


def _function(node: ast.AST, name: str) -> ast.AST:
    for part in filter(None, name.split(".")):
        inside = [child for child in ast.walk(node) if getattr(child, "name", None) == part and hasattr(child, "body")]
        node = inside[0] if inside else ast.Module([], [])
    return node


def _nodes_like(fragment: str, tree: ast.AST, new: str) -> Iterator[ast.expr | ast.stmt]:
    """The nodes that are written like ``fragment``: expressions, or statements where ``new`` is a statement or "" as well."""
    wanted: ast.AST = ast.parse(fragment).body[0]
    if isinstance(wanted, ast.Expr) and new and isinstance(ast.parse(new).body[0], ast.Expr):
        wanted = wanted.value
    text = ast.dump(wanted)
    return (node for node in ast.walk(tree) if type(node) is type(wanted) and ast.dump(node) == text)
