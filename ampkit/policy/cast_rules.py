"""The vocabulary of the cast policy: kinds of rules, groups of rules, and how groups become rules.

Nothing here touches torch beyond looking names up. The tables (`tables.py`) are written in `RuleGroup`s, the engine
works on `CastRule`s, and `expand` is the pure step between them. A rule that a user registers is a `CastRule` like any other.
"""

from __future__ import annotations

import enum
import functools
import itertools
import pkgutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


class CastKind(enum.Enum):
    """The treatment of the floating-point tensors among a function's arguments."""

    LOWER_PRECISION_FP = "cast to the session's lower precision; casts of weights are cached"
    BFLOAT16 = "cast to bfloat16, whatever the session's lower precision is"
    FP32 = "cast to float32"
    PROMOTE = "cast to the widest dtype among the arguments"
    CONTRACTION = "cast to the session's lower precision where an index is summed over, else to the widest dtype"
    MATCH_FIRST = "cast the other arguments to the dtype of the first"
    FP32_WEIGHTS = "cast the arguments after the first to float32, but for statistics in lower precision"
    REJECT = "refused when the first argument is float16"
    BANNED = "refused when any argument is float16 or bfloat16"
    NATIVE = "left to torch, which promotes by itself; nothing is patched"


# Short names for the tables.
LOWER, FP32, PROMOTE = CastKind.LOWER_PRECISION_FP, CastKind.FP32, CastKind.PROMOTE
CONTRACTION, MATCH_FIRST, FP32_WEIGHTS = CastKind.CONTRACTION, CastKind.MATCH_FIRST, CastKind.FP32_WEIGHTS
REJECT, BANNED, NATIVE = CastKind.REJECT, CastKind.BANNED, CastKind.NATIVE

TORCH = "torch"
TENSOR = "torch.Tensor"
F = "torch.nn.functional"
LINALG = "torch.linalg"
SPECIAL = "torch.special"
VF = "torch._VF"
VISION = "torch.ops.torchvision"


@dataclass(frozen=True)
class RuleGroup:
    """A row of a table: names that are treated alike, and why.

    Several owners mean that each name is looked for in all of them: ``exp`` is a function of torch and a method of
    Tensor, and has to be found under both spellings. Functions of a ``package`` beside torch are patched where it is loaded.
    ``narrow`` says that where weights are stored in lower precision the result, float32 inside, has the input's precision.
    """

    kind: CastKind
    owner: str | tuple[str, ...]
    names: tuple[str, ...]
    reason: str
    package: str = "torch"
    narrow: bool = False

    @property
    def owners(self) -> tuple[str, ...]:
        return (self.owner,) if isinstance(self.owner, str) else self.owner


@dataclass(frozen=True)
class CastRule:
    """An attribute of an object, and the treatment of its calls."""

    kind: CastKind
    owner: Any
    name: str
    reason: str = "registered by the user"
    narrow: bool = False


def expand(tables: Iterable[RuleGroup], extra_rules: Iterable[CastRule] = ()) -> list[CastRule]:
    """The rules that hold for the installed torch; names that it lacks are left out.

    One rule is left for each attribute. A later group wins over an earlier one, and ``extra_rules`` win over both: a rule
    for a function of torch.nn.functional also over the tables' rules for `namesakes`. Groups of packages that are not
    loaded are left out.
    """
    rules: dict[tuple[int, str], CastRule] = {}
    for group in tables:
        if not is_loaded(group.package):
            continue
        owners = [owner for path in group.owners if (owner := resolve_owner(path)) is not None]
        for owner, name in itertools.product(owners, group.names):
            if hasattr(owner, name):
                rules[id(owner), name] = CastRule(group.kind, owner, name, group.reason, group.narrow)
    extra = list(extra_rules)
    native = [CastRule(NATIVE, *namesake, rule.reason) for rule in extra for namesake in namesakes(rule)]
    rules.update(((id(rule.owner), rule.name), rule) for rule in (*native, *extra))
    return list(rules.values())


def namesakes(rule: CastRule) -> list[tuple[Any, str]]:
    """Public names that a function of torch.nn.functional looks up when called: ``F.softmax`` calls ``Tensor.softmax``.

    A user who registers the one chooses the dtype it computes in, which a rule for the other would overrule.
    """
    if rule.owner is not resolve_owner(F):
        return []
    name = "grid_sampler" if rule.name == "grid_sample" else rule.name
    owners = [resolve_owner(path) for path in (TORCH, TENSOR)]
    return [(owner, name) for owner in owners if hasattr(owner, name)]


def is_loaded(package: str) -> bool:
    """Whether a package was imported, and its import is over."""
    module = sys.modules.get(package)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


def resolve_owner(path: str) -> Any | None:
    """The object at a dotted path that starts with a module, or None when the installed torch has no such thing."""
    is_torch = path.partition(".")[0] == "torch"
    try:
        return _resolve_once(path) if is_torch else pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError):
        return None


#: For objects of torch, which stay where they are: each initialize asks for the same few some hundred times.
_resolve_once = functools.cache(pkgutil.resolve_name)
