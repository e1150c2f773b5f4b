"""Who may import whom (docs/architecture.md): modules import from their own layer's right and below, never upward.

Within a layer the order below counts too: a room may import those to the right of it. Within a room no files import one
another in a circle.
"""

import ast
import re
import subprocess
import sys

import pytest
from helpers import ROOT

PACKAGE = ROOT / "ampkit"

# From the top down; within a line, from left to right.
LAYERS = [
    ["__main__", "integrations", "apex", "insight", "scripts", "parallel"],
    ["api"],
    ["session"],
    [
        "validation",
        "plan",
        "iteration",
        "devices",
        "optimizers",
        "models",
        "casting",
        "compiling",
    ],
    ["policy", "kernels"],
    ["events", "registry", "libraries", "sharding", "logs", "patching", "errors", "dtypes"],
]
RANK = {room: (level, place) for level, rooms in enumerate(LAYERS) for place, room in enumerate(rooms)}


def module_of(path):
    """(its dotted name, the package that relative imports start from)"""
    # The modules of apex/legacy have the names of modules of apex.
    *package, name = (part for part in path.relative_to(PACKAGE.parent).with_suffix("").parts if part != "legacy")
    return ".".join(package if name == "__init__" else [*package, name]), tuple(package)


PATHS = {module_of(path)[0]: path for path in sorted(PACKAGE.rglob("*.py"))}


def rooms():
    for path in PATHS.values():
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room != "__init__":
            yield path, room


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


def circles(graph):
    """Return the imports that are part of a circle: a chain of imports leads back from the imported module to the importing one."""

    def reached_from(module):
        reached, waiting = set(), [module]
        while waiting:
            new = graph[waiting.pop()] - reached
            reached |= new
            waiting += new
        return reached

    reached = {module: reached_from(module) for module in graph}
    in_circles = {module: {other for other in graph[module] if module in reached[other]} for module in graph}
    return {module: others for module, others in in_circles.items() if others}


@pytest.mark.parametrize("path, room", [pytest.param(*r, id=str(r[0].relative_to(PACKAGE))) for r in rooms()])
def test_imports_go_downward(path, room):
    assert room in RANK, f"{path.name} has no place in LAYERS: give it one, here and in docs/architecture.md"
    assert violations(path.read_text(), room, module_of(path)[1]) == []


def test_tools_that_observe_load_no_module_of_the_drop_in():
    modules = [
        name
        for name in PATHS
        if name.split(".")[1:2] in (["insight"], ["scripts"]) and name != "ampkit.scripts.spawned"
    ]
    code = (
        f"import importlib, sys; [importlib.import_module(name) for name in {modules}]\n"
        "print([name for name in sys.modules if 'apex' in name])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert len(modules) > 30 and done.stdout == "[]\n"


def test_every_entry_of_the_table_is_a_room():
    entries = [room for rooms in LAYERS for room in rooms]
    assert sorted(entries) == sorted({room for _, room in rooms()})


def test_the_page_has_the_same_table():
    page = (ROOT / "docs" / "architecture.md").read_text()
    diagram = re.search(r"^    \{__main__.*\n(?:    -> .*\n)*", page, re.MULTILINE).group()
    assert [re.findall(r"\w+", layer) for layer in diagram.split("->")] == LAYERS


def test_no_files_import_one_another():
    graph = {
        module: imported_modules(path.read_text(), module_of(path)[1], PATHS.keys() - {module})
        for module, path in PATHS.items()
    }
    assert circles(graph) == {}


def test_the_check_can_fail():
    assert violations("from ampkit.session import Session", "iteration") == ["line 1: iteration imports session"]
    assert violations("def f():\n    from ampkit import api", "session") == ["line 2: session imports api"]
    assert violations("import ampkit.casting.tensors", "models") == []
    assert violations("from ..session import Session", "models", ("ampkit", "models")) == [
        "line 1: models imports session"
    ]
    assert violations("from . import session", "plan") == ["line 1: plan imports session"]
    assert violations("from .keep import kept", "models", ("ampkit", "models")) == []
    assert violations("from ampkit.models import cast_model", "casting") == ["line 1: casting imports models"]


@pytest.mark.parametrize(
    "source, imported",
    [
        ("import ampkit.a.one", {"ampkit.a.one"}),
        ("from ampkit.a.one import f", {"ampkit.a.one"}),
        ("from ampkit.a import one, f", {"ampkit.a.one", "ampkit.a"}),
        ("from . import one", {"ampkit.a.one"}),
        ("from .one import f", {"ampkit.a.one"}),
        ("from .. import a", {"ampkit.a"}),
        ("from .. import f", {"ampkit"}),
        ("import ampkit, os", {"ampkit"}),
        ("def f():\n    from .one import f", {"ampkit.a.one"}),
        ("if TYPE_CHECKING:\n    from .one import F", {"ampkit.a.one"}),
    ],
)
def test_modules_are_found_however_they_are_imported(source, imported):
    modules = {"ampkit", "ampkit.a", "ampkit.a.one", "ampkit.a.two"}
    assert imported_modules(source, ("ampkit", "a"), modules) == imported


def test_circles_are_found_and_what_leads_to_them_is_none():
    graph = {"a": {"b", "d"}, "b": {"c"}, "c": {"a"}, "d": {"e"}, "e": set(), "f": {"a"}, "g": {"g"}}
    assert circles(graph) == {"a": {"b"}, "b": {"c"}, "c": {"a"}, "g": {"g"}}
