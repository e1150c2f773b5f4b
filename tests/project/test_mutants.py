"""The planted faults fit the project as it is now. `make mutants` plants them, which takes longer."""

import ast
import functools

from helpers import ROOT
from mutants.fault import StaleRow, named, rows

ROWS = rows() + rows("cuda")


def test_each_named_fault_has_its_place_and_changes_it():
    stale = []
    for row in ROWS:
        try:
            fault = named(row, ROOT)
            changed = fault.planted(ROOT)
            assert changed != (ROOT / fault.file).read_text(), f"{row['promise']!r} changes nothing"
            if not fault.is_cpp:
                ast.parse(changed)
        except StaleRow as error:
            stale.append(str(error))
    assert not stale, "\n".join(stale)


def test_the_tests_that_should_notice_exist():
    """`make mutants` itself leaves out slow tests, which are no part of `make test`."""
    tests = {name.partition("[")[0].partition("::")[::2] for row in ROWS for name in row["tests"]}
    missing = [f"{file}::{test}" for file, test in sorted(tests) if test and test not in functions_of(file)]
    assert not missing, "\n".join(missing)


@functools.cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
