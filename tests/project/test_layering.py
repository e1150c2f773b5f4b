"""Who may import whom (docs/architecture.md): modules import from their own layer's right and below, never upward.

Within a layer the order below counts too: a room may import those to the right of it.
"""

import ast

import pytest
from helpers import ROOT

PACKAGE = ROOT / "ampkit"

# From the top down; within a line, from left to right.
LAYERS = [
    ["__main__", "apex", "insight", "parallel"],
    ["gradient_sync"],
    ["api"],
    ["session", "scaling"],
    ["accept", "registry", "devices", "optimizers", "models", "casting", "compiling", "patching", "plan"],
    ["policy", "loss_scale", "findings", "kernels"],
    ["logs", "errors"],
]
RANK = {room: (level, place) for level, rooms in enumerate(LAYERS) for place, room in enumerate(rooms)}


def rooms():
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room != "__init__":
            yield path, room


def imported_rooms(tree, package):
    """Rooms of ampkit named by any import statement, those inside functions and TYPE_CHECKING included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [module] if module != "ampkit" else [f"ampkit.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "ampkit" and len(parts) > 1:
                yield node.lineno, parts[1]


def violations(source, room, package=("ampkit",)):
    return [
        f"line {line}: {room} imports {other}"
        for line, other in imported_rooms(ast.parse(source), list(package))
        if other in RANK and other != room and RANK[other] <= RANK[room]
    ]


@pytest.mark.parametrize("path, room", [pytest.param(*r, id=str(r[0].relative_to(PACKAGE))) for r in rooms()])
def test_imports_go_downward(path, room):
    assert room in RANK, f"{path.name} has no place in LAYERS: give it one, here and in docs/architecture.md"
    package = path.relative_to(PACKAGE.parent).parts[:-1]
    assert violations(path.read_text(), room, package) == []


def test_the_check_can_fail():
    assert violations("from ampkit.session import Session", "loss_scale") == ["line 1: loss_scale imports session"]
    assert violations("def f():\n    from ampkit import api", "session") == ["line 2: session imports api"]
    assert violations("import ampkit.casting.tensors", "models") == []
    assert violations("from ..session import Session", "models", ("ampkit", "models")) == [
        "line 1: models imports session"
    ]
    assert violations("from . import session", "plan") == ["line 1: plan imports session"]
    assert violations("from .keep import kept", "models", ("ampkit", "models")) == []
    assert violations("from ampkit.models import cast_model", "casting") == ["line 1: casting imports models"]
