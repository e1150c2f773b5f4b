"""The table of planted faults fits the project as it is now. `make mutants` plants them, which takes longer."""

import ast
import functools

from helpers import ROOT
from mutants.table import MUTANTS, StaleRow, planted


def test_what_is_replaced_stands_in_its_file_once():
    stale = []
    for mutant in MUTANTS:
        try:
            assert planted(mutant, ROOT) != (ROOT / mutant.file).read_text(), f"{mutant.name} changes nothing"
        except StaleRow as error:
            stale.append(f"{mutant.name}: {error}")
    assert not stale, "\n".join(stale)


def test_names_of_mutants_differ():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) > 40


def test_the_tests_that_should_notice_exist():
    """`make mutants` itself leaves out slow ones, which are no part of `make test`."""
    names = {name.partition("[")[0].partition("::")[::2] for mutant in MUTANTS for name in mutant.tests}
    missing = [f"{file}::{test}" for file, test in sorted(names) if test and test not in functions_of(file)]
    assert not missing, "\n".join(missing)


@functools.cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
