"""The checks of `make lint`, except for types, run by the tests too, where ruff is installed."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

RUFF = Path(sys.executable).with_name("ruff")


@pytest.mark.skipif(not RUFF.exists(), reason="ruff is not installed beside this Python")
@pytest.mark.parametrize("arguments", [("check",), ("format", "--check")], ids=" ".join)
def test_code_is_clean(arguments):
    done = subprocess.run([RUFF, *arguments, "--no-cache", "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


#: A docstring says what its object is or does: its first word is a verb or a noun. A name says what it holds.
BEGINNINGS = set("What Those It They Some Have One Where How".split())
PRONOUNS = set("found one own given others what theirs ours mine it they them those some".split())


def dialect(source):
    """Names of definitions whose docstring begins with a pronoun, and pronouns that name something for more than three lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            docstring = ast.get_docstring(node) or ""
            if docstring.startswith("The same") or docstring.split(" ")[0] in BEGINNINGS:
                yield getattr(node, "name", "module")
        if isinstance(node, ast.FunctionDef):
            lines = {}
            for inner in ast.walk(node):
                name = inner.id if isinstance(inner, ast.Name) else inner.arg if isinstance(inner, ast.arg) else None
                if name in PRONOUNS:
                    lines.setdefault(name, []).append(inner.lineno)
            yield from (f"{name} in {node.name}" for name, at in lines.items() if max(at) - min(at) > 3)


def test_docstrings_begin_with_a_verb_or_a_noun_and_names_are_no_pronouns():
    folders = ("ampkit", "benchmarks", "docs", "examples", "tests")
    sources = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    assert {str(path): faults for path in sources if (faults := list(dialect(path.read_text())))} == {}
    assert list(dialect('def f(found):\n    """What it is."""\n\n\n\n    return found')) == ["f", "found in f"]
