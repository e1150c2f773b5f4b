"""Apex's lists from the core's tables: the names of an owner's functions under one kind."""

from __future__ import annotations

from typing import Any

from ....policy.cast_rules import CastKind, resolve_owner
from ....policy.tables import APEX, APEX_ONLY


def names(owner: str, *kinds: CastKind) -> list[str]:
    """The names that Apex's tables list for an owner, in their order, as far as this torch has them."""
    listed = [
        name for group in (*APEX, *APEX_ONLY) if group.kind in kinds and owner in group.owners for name in group.names
    ]
    return [name for name in listed if hasattr(resolve_owner(owner), name)]


def promoted(owner: str) -> list[str]:
    """The functions that Apex promoted; most of them torch promotes by itself now."""
    listed = names(owner, CastKind.PROMOTE, CastKind.NATIVE)
    sequences = ("cat", "stack", "__ipow__")
    return [name for name in listed if name not in sequences and (not name.endswith("_") or name.endswith("__"))]


def banned_name(entry: Any) -> str:
    """The function's name in an entry of BANNED_FUNCS, which is a pair of name and message."""
    return entry[0] if isinstance(entry, tuple) else entry
