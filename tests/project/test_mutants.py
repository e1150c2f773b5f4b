"""The named faults fit the project as it is now. `make mutants` plants them, which takes longer."""

import ast
import functools

import pytest
from helpers import ROOT
from mutants.fault import StaleRow, named, rows
from mutants.operators import faults_of

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


SOURCE = """
def f(a, b: int = 3):
    log.info("Words", 1)
    if a < b and not isinstance(a, str):
        raise ValueError(f"{a} is less than {b}")
    return g(a, b)
"""
CHANGES = {
    "a < b and not isinstance(a, str) -> (not (a < b and (not isinstance(a, str))))",
    "a < b -> (a >= b)",
    "not isinstance(a, str) -> (not (not isinstance(a, str)))",
    'raise ValueError(f"{a} is less than {b}") -> pass',
    "return g(a, b) -> return None",
    "g(a, b) -> (g(b, a))",
}


def test_operators_plant_each_kind_and_leave_words_and_annotations_alone(tmp_path):
    (tmp_path / "source.py").write_text(SOURCE)
    assert {f"{fault.old} -> {fault.new}" for fault, _ in faults_of(tmp_path, "source.py")} == CHANGES


def test_a_named_fault_is_found_in_another_layout_and_not_where_it_stands_twice(tmp_path):
    row = {"promise": "", "where": "source.py::f", "old": "g(a,  b)", "new": "a", "tests": []}
    (tmp_path / "source.py").write_text(SOURCE.replace("g(a, b)", "(g(\n        a,\n        b,\n    ))"))
    assert named(row, tmp_path).line == 6
    (tmp_path / "source.py").write_text(SOURCE.replace("g(a, b)", "g(a, b) + g(a, b)"))
    with pytest.raises(StaleRow, match="stands 2 times"):
        named(row, tmp_path)
