"""Who may import whom (docs/architecture.md): modules import from their own layer's right and below, never upward.

Within a layer the order below counts too: a room may import those to the right of it. Within a room no files import one
another in a circle.
"""

import ast
import graphlib
import re

import pytest
from helpers import ROOT, python

PACKAGE = ROOT / "ampkit"

# From the top down; within a line, from left to right.
DIAGRAM = re.search(
    r"^    \{__main__.*\n(?:    -> .*\n)*", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE
)
LAYERS = [re.findall(r"\w+", layer) for layer in DIAGRAM.group().split("->")]
RANK = {room: (level, place) for level, rooms in enumerate(LAYERS) for place, room in enumerate(rooms)}


def module_of(path):
    """(its dotted name, the package that relative imports start from)"""
    # The modules of apex/legacy have the names of modules of apex.
    *package, name = (part for part in path.relative_to(PACKAGE.parent).with_suffix("").parts if part != "legacy")
    return ".".join(package if name == "__init__" else [*package, name]), tuple(package)


PATHS = {module_of(path)[0]: path for path in sorted(PACKAGE.rglob("*.py"))}


ROOMS = [
    (path, path.relative_to(PACKAGE).parts[0].removesuffix(".py"))
    for path in PATHS.values()
    if path != PACKAGE / "__init__.py"
]


def imports(source, package):
    """(line, module, name in it or None) of every import statement, those inside functions and TYPE_CHECKING included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, module, alias.name) for alias in node.names)


def violations(source, room, package=("ampkit",)):
    faults = []
    for line, module, name in imports(source, package):
        parts = [*module.split("."), *([name] if name else [])]
        other = parts[1] if parts[0] == "ampkit" and len(parts) > 1 else None
        if other in RANK and other != room and RANK[other] <= RANK[room]:
            faults.append(f"line {line}: {room} imports {other}")
    return faults


def imported_modules(source, package, modules):
    """Return those of ``modules`` that ``source`` imports, or imports a name from."""
    imported = set()
    for _, module, name in imports(source, package):
        imported.add(f"{module}.{name}" if f"{module}.{name}" in modules else module)
    return imported & modules


@pytest.mark.parametrize("path, room", ROOMS, ids=lambda one: getattr(one, "stem", one))
def test_imports_go_downward(path, room):
    assert room in RANK, f"{path.name} has no place in docs/architecture.md: give it one"
    assert violations(path.read_text(), room, module_of(path)[1]) == []


def test_tools_that_observe_load_no_module_of_the_drop_in():
    rooms = ("ampkit.insight", "ampkit.scripts")
    modules = [name for name in PATHS if name.startswith(rooms) and name != "ampkit.scripts.spawned"]
    code = f"import importlib, sys; [importlib.import_module(name) for name in {modules}]"
    code += "\nprint([name for name in sys.modules if 'apex' in name])"
    assert len(modules) > 30 and python("-c", code).stdout == "[]\n"


def test_every_entry_of_the_table_is_a_room():
    entries = [room for rooms in LAYERS for room in rooms]
    assert sorted(entries) == sorted({room for _, room in ROOMS})


def test_no_files_import_one_another_in_a_circle():
    graph = {
        module: imported_modules(path.read_text(), module_of(path)[1], PATHS.keys() - {module})
        for module, path in PATHS.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_the_checks_can_fail():
    assert violations("def f():\n    from ampkit import api", "session") == ["line 2: session imports api"]
    source = "from ..session import Session\nfrom .keep import kept\nimport ampkit.casting.tensors"
    assert violations(source, "models", ("ampkit", "models")) == ["line 1: models imports session"]
