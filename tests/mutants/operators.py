"""All faults that operators over the syntax tree can plant in the functions of a Python file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from .fault import Fault, replacement

OPPOSITE = {
    ast.Lt: ">=",
    ast.LtE: ">",
    ast.Gt: "<=",
    ast.GtE: "<",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}

# Code that only makes words: no test need pin it.
OF_WORDS = {"__repr__", "__str__", "__dir__", "extra_repr", "_describe", "describe"}
CALLS_OF_WORDS = {"warn", "warning", "info", "debug", "log", "print"}
UNSEEN_KEYWORDS = {"stacklevel", "maxsize", "maxlen"}
OF_TYPES = {"isinstance", "issubclass", "getattr", "setattr", "hasattr"}
SYMMETRIC = {"min", "max", "promote_types"}
NOT_LOOKED_INTO = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.JoinedStr, ast.Raise, ast.Assert)
SIMPLE_CONDITIONS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)


def faults_of(folder: Path, file: str) -> Iterator[tuple[Fault, int]]:
    """Yield each fault with the first line of its function, as ``code.co_firstlineno`` counts it."""
    source = (folder / file).read_text()
    for function in functions(ast.parse(source)):
        first = min(node.lineno for node in (function, *function.decorator_list))
        for node in _looked_at(function.body):
            for place, new in _changes(node):
                yield replacement(file, source, place, new), first


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name not in OF_WORDS:
            yield node


def _looked_at(nodes: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the nodes below these, without inner functions, annotations, strings, and code that makes words."""
    for node in nodes:
        yield node
        if isinstance(node, NOT_LOOKED_INTO) or _makes_words(node):
            continue
        children = dict(ast.iter_fields(node))
        children.pop("annotation", None)
        for child in children.values():
            below = child if isinstance(child, list) else [child]
            yield from _looked_at([one for one in below if isinstance(one, ast.AST)])


def _makes_words(node: ast.AST) -> bool:
    if isinstance(node, ast.keyword):
        return node.arg in UNSEEN_KEYWORDS
    call = node.value if isinstance(node, ast.Expr) else node
    return isinstance(call, ast.Call) and _name(call.func) in CALLS_OF_WORDS


def _name(function: ast.expr) -> str | None:
    return getattr(function, "attr", getattr(function, "id", None))


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    match node:
        case ast.Compare(ops=[only]):
            yield node, f"{ast.unparse(node.left)} {OPPOSITE[type(only)]} {ast.unparse(node.comparators[0])}"
        case ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
            yield node, f"not ({ast.unparse(node)})"
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if isinstance(test, SIMPLE_CONDITIONS):
            yield test, f"not {ast.unparse(test)}"
        case ast.Constant(value=bool(value)):
            yield node, str(not value)
        case ast.Constant(value=int() | float() as value):
            yield node, repr(value + 1)
        case ast.Call(func=function, args=[first, second, *others]) if _may_be_swapped(function, first, second):
            yield node, ast.unparse(ast.Call(function, [second, first, *others], node.keywords))
        case ast.Return(value=ast.expr() as value) if not isinstance(value, (ast.Constant, ast.JoinedStr)):
            yield node, "return None"
        case ast.Expr(value=ast.Call()) if not _makes_words(node):
            yield node, ""
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign() | ast.Delete():
            yield node, ""
        case ast.Raise(exc=ast.expr()) | ast.Continue() | ast.Break():
            yield node, ""


def _may_be_swapped(function: ast.expr, first: ast.expr, second: ast.expr) -> bool:
    """Swapped arguments of `isinstance` and the like raise TypeError at once, and those of `max` change nothing."""
    is_plain = not any(isinstance(one, ast.Starred) for one in (first, second))
    return is_plain and ast.dump(first) != ast.dump(second) and _name(function) not in OF_TYPES | SYMMETRIC
