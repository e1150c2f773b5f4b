"""`Policy`: which tables O1 follows, and what the caller has changed in them.

`Policy.of` makes a `Policy` of the argument ``initialize(policy=)``, and checks it. The engine takes its rules from
there.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ConfigurationError
from .cast_rules import FP32, MATCH_FIRST, NATIVE, CastKind, CastRule, expand, resolve_owner
from .tables import TABLES

AUTOCAST = "autocast"
BASES = ("default", "apex", AUTOCAST, "autocast-cpu", "autocast-cuda")

# The values that a row may be changed to.
CHANGES = {
    "lower": CastKind.LOWER_PRECISION_FP,
    "bfloat16": CastKind.BFLOAT16,
    "fp32": CastKind.FP32,
    "promote": CastKind.PROMOTE,
    "native": CastKind.NATIVE,
    "error": CastKind.BANNED,
}
IN_PLACE_CHANGES = {"promote": MATCH_FIRST, "native": NATIVE, "error": CastKind.BANNED}
BANNED_CHANGES = {"error": CastKind.BANNED, "fp32": FP32, "allow": NATIVE}

_IN_PLACE = re.compile(
    r"__setitem__|__i(add|sub|mul|div|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__|.*[^_]_", re.DOTALL
)


@dataclass(frozen=True, repr=False)
class Policy:
    """The precision that each torch function computes in, at every level but O0.

    ``base`` names the tables: ``"default"``, ``"apex"`` (Apex's lists), or ``"autocast"``, torch.autocast's list for the
    device type of the models (``"autocast-cpu"`` and ``"autocast-cuda"`` name one outright). A function that a list does
    not know keeps the default's row.

    ``overrides`` changes single rows: the full name of a function to ``"lower"`` (the session's lower precision),
    ``"bfloat16"``, ``"fp32"``, ``"promote"`` (the widest dtype among the arguments), ``"native"`` (left to torch) or
    ``"error"`` (refused in lower precision). ``banned`` chooses for functions that the tables refuse:
    ``"error"``, ``"fp32"`` or ``"allow"``.

    Raises `ConfigurationError` for a base, a function, a row or a ``banned`` that does not exist, and names the nearest function.

    Source of the tables: NVIDIA's apex.amp and torch.autocast; where these disagree, what docs/policy.md has measured.

    >>> Policy("apex", {"torch.nn.functional.gelu": "lower"}, banned="fp32")
    Policy('apex', {'torch.nn.functional.gelu': 'lower'}, banned='fp32')
    """

    base: str = "default"
    overrides: Any = ()  # a mapping; kept as sorted pairs, which can be hashed
    banned: str = "error"

    def __post_init__(self) -> None:
        if self.base not in BASES:
            raise _refuse("policy", self.base, BASES)
        if self.banned not in BANNED_CHANGES:
            raise _refuse("Policy(banned=)", self.banned, BANNED_CHANGES)
        try:
            overrides = dict(self.overrides)
        except (TypeError, ValueError):
            raise ConfigurationError(
                f"Policy(overrides={self.overrides!r}) is not accepted: expected names of functions and what they become, "
                "as in {'torch.nn.functional.gelu': 'fp32'}."
            ) from None
        for path, change in overrides.items():
            _rule(path, change)
        object.__setattr__(self, "overrides", tuple(sorted(overrides.items())))

    @classmethod
    def of(cls, value: str | Mapping[str, str] | Policy) -> Policy:
        """The policy that a caller means by a name, a dict of changed rows, or a `Policy`."""
        if isinstance(value, Policy):
            return value
        if isinstance(value, Mapping):
            return cls(overrides=value)
        if isinstance(value, str):
            return cls(value)
        raise _refuse("policy", value, BASES)

    def for_device(self, device_type: str) -> Policy:
        """A policy with torch.autocast's list for this device type in place of ``"autocast"``."""
        if self.base != AUTOCAST:
            return self
        return replace(self, base="autocast-cpu" if device_type == "cpu" else "autocast-cuda")

    def rules(self, registered: Iterable[CastRule] = (), later: Iterable[CastRule] = ()) -> list[CastRule]:
        """The rules (`expand`) of the tables, the user's registrations, the changed rows, and ``later`` ones; the last win."""
        banned = BANNED_CHANGES[self.banned]
        groups = [
            replace(group, kind=banned) if group.kind is CastKind.BANNED else group for group in TABLES[self.base]
        ]
        return expand(groups, [*registered, *(_rule(path, change) for path, change in self.overrides), *later])

    def __repr__(self) -> str:
        shown = [repr(self.base)]
        if self.overrides:
            shown.append(repr(dict(self.overrides)))
        if self.banned != "error":
            shown.append(f"banned={self.banned!r}")
        return f"Policy({', '.join(shown)})"


def _rule(path: Any, change: Any) -> CastRule:
    """Check a changed row, and return its rule."""
    if not isinstance(path, str):
        raise ConfigurationError(
            f"policy={{{path!r}: ...}}: a row is named by a string, the full name of its function: "
            "{'torch.nn.functional.gelu': 'fp32'}."
        )
    owner_path, _, name = path.rpartition(".")
    owner = resolve_owner(owner_path) if owner_path else None
    function = getattr(owner, name, None)
    if not callable(function):
        raise ConfigurationError(
            f"policy={{{path!r}: ...}}: there is no function of that name.{_suggestion(path)} Write it in full, with the "
            "module or class that holds it."
        )
    if isinstance(function, type):
        raise ConfigurationError(
            f"policy={{{path!r}: ...}} names a class. Name a function that it calls, such as "
            "'torch.nn.functional.linear' for torch.nn.Linear."
        )
    accepted = IN_PLACE_CHANGES if _IN_PLACE.fullmatch(name) else CHANGES
    if not isinstance(change, str) or change not in accepted:
        advice = " It writes to its tensor, which keeps its dtype." if accepted is IN_PLACE_CHANGES else ""
        raise _refuse(f"policy={{{path!r}: ...}}", change, accepted, advice)
    return CastRule(accepted[change], owner, name, "changed by the caller's policy")


def _suggestion(path: str) -> str:
    known = [f"{owner}.{name}" for group in TABLES["default"] for owner in group.owners for name in group.names]
    last = path.rpartition(".")[2]
    near = [name for name in known if name.rpartition(".")[2] == last] or difflib.get_close_matches(path, known)
    return f" Did you mean {' or '.join(repr(name) for name in near[:3])}?" if near else ""


def _refuse(setting: str, value: Any, accepted: Iterable[str], advice: str = "") -> ConfigurationError:
    expected = ", ".join(repr(name) for name in accepted)
    return ConfigurationError(f"{setting}={value!r} is not accepted: expected one of {expected}.{advice}")
